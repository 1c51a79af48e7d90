/* The instructions that mean the same in all releases since CPython 3.11. A release's own come before: see
[Note: versions]. An instruction that is in no table does nothing that the witness wants to know. */

#ifndef LAZYSTEP_OPCODES_H
#define LAZYSTEP_OPCODES_H

#include <opcode.h>

#include "operations.h"

#define DOES(what, arg) \
    return (Operation) { what, 1, -1, arg }

static Operation common_operation_of(int opcode, int oparg)
{
    switch (opcode) {
    case YIELD_VALUE: /* C code may take it */
    case RETURN_VALUE: DOES(DO_RETURN, 0);
    case LOAD_NAME: DOES(DO_READ_NAME, oparg);
    case STORE_GLOBAL: DOES(DO_WRITE_GLOBAL, oparg);
    case DELETE_GLOBAL: DOES(DO_DELETE_GLOBAL, oparg);
    case STORE_NAME: DOES(DO_WRITE_NAME, oparg);
    case LOAD_DEREF: DOES(DO_READ_CELL, oparg);
    case STORE_DEREF: DOES(DO_WRITE_CELL, oparg);
    case DELETE_DEREF: DOES(DO_DELETE_CELL, oparg);
    case STORE_ATTR: DOES(DO_WRITE_ATTRIBUTE, oparg);
    case DELETE_ATTR: DOES(DO_DELETE_ATTRIBUTE, oparg);
    case BINARY_SUBSCR: DOES(DO_READ_ITEM, 0);
    case STORE_SUBSCR: DOES(DO_WRITE_ITEM, 0);
    case DELETE_SUBSCR: DOES(DO_DELETE_ITEM, 0);
    case BUILD_SLICE: DOES(DO_BUILD_SLICE, oparg);
    case BINARY_OP: DOES(DO_BINARY, BINARY(oparg));
    case COMPARE_OP: DOES(DO_BINARY, 0);
    case CONTAINS_OP: DOES(DO_CONTAINS, 0);
    case IS_OP: DOES(DO_IS, 0);
    case UNARY_NOT: DOES(DO_TRUTH, 0);
    case UNARY_INVERT:
    case SET_UPDATE: DOES(DO_LOOK_INTO, 0);
    case LIST_EXTEND: DOES(DO_COPY, 0);
    case DICT_MERGE:
    case DICT_UPDATE: DOES(DO_COPY, 1);
    case BUILD_SET: DOES(DO_LOOK_AT, oparg); /* they are hashed */
    case SET_ADD:
    case CHECK_EXC_MATCH:
    case CHECK_EG_MATCH: DOES(DO_LOOK_AT, 1); /* `except` with a tuple of classes */
    case BUILD_MAP: DOES(DO_BUILD_MAP, oparg);
    case MAP_ADD: DOES(DO_BUILD_MAP, 1);
    case GET_LEN:
    case MATCH_MAPPING:
    case MATCH_SEQUENCE: DOES(DO_LOOK_OVER, 0);
    case UNPACK_SEQUENCE: DOES(DO_UNPACK, oparg);
    case UNPACK_EX: DOES(DO_UNPACK_REST, 0);
    case GET_ITER:
    case GET_YIELD_FROM_ITER: DOES(DO_ITERATE, 0);
    case FOR_ITER: DOES(DO_TAKE, 1);
    case SEND: DOES(DO_TAKE, 2);
    case MATCH_KEYS: DOES(DO_MATCH_KEYS, 0);
    case MATCH_CLASS: DOES(DO_MATCH_CLASS, oparg);
    case BEFORE_WITH: DOES(DO_ENTER, 0);
    case IMPORT_NAME: DOES(DO_IMPORT, oparg);
    case IMPORT_FROM: DOES(DO_IMPORT_FROM, oparg);
    case MAKE_FUNCTION: DOES(DO_MAKE_FUNCTION, 0);
    case CALL: DOES(DO_CALL, oparg);
    case CALL_FUNCTION_EX: DOES(DO_CALL_EXPANDED, oparg & 1);
    default: DOES(DO_NOTHING, 0);
    }
}

#endif
