// The threads: made once, they all walk the same function ("single program, multiple data") and
// meet at barriers.
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

typedef struct Team Team;
typedef void Work(void *argument, Team *team, int thread);

struct Team {
    int threads;
    Work *work;
    void *argument;
    int pins;                 // number of the worker's cores below; 0: the system chooses
    const int32_t *cores;
    pthread_mutex_t entrance; // one call at a time
    pthread_mutex_t sleeping;
    pthread_cond_t changed;
    atomic_int sleepers;
    _Alignas(64) atomic_int calls;      // goes up with every call: workers wait for it
    _Alignas(64) atomic_int generation; // goes up with every barrier
    _Alignas(64) atomic_int arrived;
    // the next piece of the phase between two barriers that nobody has
    _Alignas(64) atomic_int next;
};

// The caller of `team_run` is thread 0; the others are started here. `cores` [threads]: where they
// may run, or NULL.
Team *team_make(int threads, const int32_t *cores);

// Runs `work` in every thread; ends when all have ended.
void team_run(Team *team, Work *work, void *argument);

// Everybody waits until all are here. What was written before is seen by all after.
void team_barrier(Team *team);

// The first of the next `count` pieces of this phase. Whoever is slow (its core may be busy with
// another program) takes fewer.
static inline int team_claim(Team *team, int count) {
    return atomic_fetch_add_explicit(&team->next, count, memory_order_relaxed);
}
