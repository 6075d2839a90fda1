/* When it pays to look again instead of sleeping: shm/spin.py says the same of everything that is written in Python, and why. */

#ifndef TENSORD_SPIN_H
#define TENSORD_SPIN_H

#include <sched.h>
#include <stdint.h>

#include "_lanes.h"

typedef struct {
    uint64_t limit_ns, since;
    int worth;
} spin_t;

/* Until when to look; 0: sleep. */
static uint64_t spin_begin(spin_t *spin, uint64_t now, uint64_t worked_ns) {
    spin->since = now;
    return spin->worth && 2 * worked_ns <= spin->limit_ns ? now + spin->limit_ns : 0;
}

/* Gives the processor away between two looks. Returns what time it is then. */
static uint64_t spin_give_way(void) {
    sched_yield();
    return now_ns();
}

static void spin_end(spin_t *spin, uint64_t now) { spin->worth = now - spin->since < spin->limit_ns; }

#endif
