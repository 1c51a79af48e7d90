/* How deep is the value stack before each instruction of a code object?

From 3.12 on, the interpreter keeps the top of the stack to itself while it calls a monitoring tool. But the
compiler gives each instruction one depth, whichever way it is reached, because the exception table needs it.
So the depths follow from the code: from its beginning (0) and its handlers (by the table), along all jumps,
with the effects that the interpreter itself declares. Two ways that disagree, a depth below 0, or a return with
more than its value on the stack mean that the effects are not those of this release: an error, and no guess. */

#ifndef LAZYSTEP_STACK_DEPTHS_H
#define LAZYSTEP_STACK_DEPTHS_H

#include "opcodes.h"

typedef struct {
    Decoded *decoded;
    int *work; /* units whose successors are not known yet */
    Py_ssize_t num_work;
} Depths;

static int reach(Depths *depths, Py_ssize_t unit, int depth)
{
    if (unit < 0 || unit >= depths->decoded->size || depth < 0 || depth > SHRT_MAX) {
        return -1;
    }
    Operation *operation = &depths->decoded->operations[unit];
    if (operation->depth < 0) {
        operation->depth = (short)depth;
        depths->work[depths->num_work++] = (int)unit;
    }
    return operation->depth == depth ? 0 : -1;
}

/* A number of the exception table: six bits a byte, most significant first. */
static int read_number(const unsigned char **at, const unsigned char *end)
{
    int number = 0;
    while (*at < end) {
        unsigned char byte = *(*at)++;
        number = number << 6 | (byte & 63);
        if (!(byte & 64)) {
            break;
        }
    }
    return number;
}

static int reach_handlers(Depths *depths, PyObject *table)
{
    const unsigned char *at = (const unsigned char *)PyBytes_AS_STRING(table);
    const unsigned char *end = at + PyBytes_GET_SIZE(table);
    while (at < end) {
        read_number(&at, end); /* the first unit that it guards */
        read_number(&at, end); /* how many */
        int target = read_number(&at, end);
        int depth = read_number(&at, end);
        /* The handler finds the exception, and below it, if wanted, where it was raised. */
        if (reach(depths, target, (depth >> 1) + (depth & 1) + 1) < 0) {
            return -1;
        }
    }
    return 0;
}

static int effect_of(int opcode, int oparg, int jumps)
{
    /* What is sent into a generator when it is started lies on its stack. */
    return opcode == RETURN_GENERATOR ? 1 : PyCompile_OpcodeStackEffectWithJump(opcode, oparg, jumps);
}

/* Go on from an instruction whose depth is known. */
static int follow_instruction(Depths *depths, const unsigned char *units, Py_ssize_t unit)
{
    int depth = depths->decoded->operations[unit].depth;
    int opcode = units[2 * unit], oparg = units[2 * unit + 1];
    while (opcode == EXTENDED_ARG) { /* the instruction has the depth of its first unit */
        if (++unit >= depths->decoded->size) {
            return -1;
        }
        depths->decoded->operations[unit].depth = (short)depth;
        opcode = units[2 * unit];
        oparg = oparg << 8 | units[2 * unit + 1];
    }
    Py_ssize_t next = unit + 1;
    while (next < depths->decoded->size && units[2 * next] == CACHE) {
        next++;
    }
    switch (opcode) {
    case RETURN_VALUE: return depth == 1 ? 0 : -1;
    case RETURN_CONST: return depth == 0 ? 0 : -1;
    case RAISE_VARARGS:
    case RERAISE: return 0;
    case JUMP_FORWARD: return reach(depths, next + oparg, depth);
    case JUMP_BACKWARD:
    case JUMP_BACKWARD_NO_INTERRUPT: return reach(depths, next - oparg, depth);
    case POP_JUMP_IF_FALSE:
    case POP_JUMP_IF_TRUE:
    case POP_JUMP_IF_NONE:
    case POP_JUMP_IF_NOT_NONE:
    case FOR_ITER:
    case SEND:
        if (reach(depths, next + oparg, depth + effect_of(opcode, oparg, 1)) < 0) {
            return -1;
        }
        break;
    default: break;
    }
    return reach(depths, next, depth + effect_of(opcode, oparg, 0));
}

static int find_depths(Decoded *decoded, PyCodeObject *code, const unsigned char *units)
{
    Depths depths = {decoded, PyMem_Malloc(sizeof(int) * (decoded->size + 1)), 0};
    if (depths.work == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    int done = reach(&depths, 0, 0);
    if (done == 0) {
        done = reach_handlers(&depths, code->co_exceptiontable);
    }
    while (done == 0 && depths.num_work) {
        done = follow_instruction(&depths, units, depths.work[--depths.num_work]);
    }
    PyMem_Free(depths.work);
    if (done < 0) {
        PyErr_Format(PyExc_RuntimeError, "the value stack of %R is not understood", code);
    }
    return done;
}

#endif
