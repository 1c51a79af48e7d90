/* A hash table whose keys are two addresses and a kind. */

#ifndef LAZYSTEP_TABLE_H
#define LAZYSTEP_TABLE_H

#include <Python.h>

typedef struct {
    void *owner;  /* NULL: an empty row */
    void *key;
    int kind;
    unsigned flags;
} Row;

typedef struct {
    Row *rows;
    size_t size; /* a power of two, or 0 */
    size_t used;
} Table;

static size_t hash_of(const void *owner, const void *key, int kind)
{
    size_t h = (size_t)owner >> 4;
    h ^= ((size_t)key >> 4) * 0x9E3779B97F4A7C15ull;
    h ^= (size_t)kind << 7;
    h *= 0xBF58476D1CE4E5B9ull;
    return h ^ (h >> 29);
}

static Row *table_find(Table *table, const void *owner, const void *key, int kind)
{
    if (table->size == 0) {
        return NULL;
    }
    size_t mask = table->size - 1;
    for (size_t i = hash_of(owner, key, kind) & mask; table->rows[i].owner != NULL; i = (i + 1) & mask) {
        Row *row = &table->rows[i];
        if (row->owner == owner && row->key == key && row->kind == kind) {
            return row;
        }
    }
    return NULL;
}

static Row *table_add(Table *table, void *owner, void *key, int kind, unsigned flags)
{
    if (table->used * 2 >= table->size) {
        size_t size = table->size ? table->size * 2 : 1024;
        Row *rows = PyMem_RawCalloc(size, sizeof(Row));
        if (rows == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        for (size_t i = 0; i < table->size; i++) {
            Row row = table->rows[i];
            if (row.owner != NULL) {
                size_t j = hash_of(row.owner, row.key, row.kind) & (size - 1);
                while (rows[j].owner != NULL) {
                    j = (j + 1) & (size - 1);
                }
                rows[j] = row;
            }
        }
        PyMem_RawFree(table->rows);
        table->rows = rows;
        table->size = size;
    }
    size_t mask = table->size - 1;
    size_t i = hash_of(owner, key, kind) & mask;
    while (table->rows[i].owner != NULL) {
        i = (i + 1) & mask;
    }
    table->rows[i] = (Row){owner, key, kind, flags};
    table->used++;
    return &table->rows[i];
}

static void table_clear(Table *table)
{
    PyMem_RawFree(table->rows);
    *table = (Table){NULL, 0, 0};
}

#endif
