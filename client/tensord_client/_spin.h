/* When to poll for a datagram before sleeping (_spin.c). */

#ifndef TENSORD_CLIENT_SPIN_H
#define TENSORD_CLIENT_SPIN_H

#include "_lane.h"

#include <stdint.h>

typedef struct {
    PyObject_HEAD
    /* How long to poll at most; when the last wait began and ended; in ns of CLOCK_MONOTONIC. */
    uint64_t limit, since, ended;
    /* Whether the last wait was short enough. */
    int worth;
} spin_t;

uint64_t now_ns(void);

/* Begins a wait: polls, if it is worth it, until the descriptor is readable. Needs no interpreter. */
void spin_before(spin_t *self, int fd);

/* Ends a wait. */
void spin_after(spin_t *self);

#endif
