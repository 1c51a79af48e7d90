// One translation unit: reading torch's headers takes longer than compiling all of this.
#include "handle.cpp"

#include "decision.cpp"

#include "recorder.cpp"

#include "call.cpp"

#include "host.cpp"

#include "autocast.cpp"

#include "kernel.cpp"

#include "cut.cpp"

#include "replay.cpp"

#include "module.cpp"
