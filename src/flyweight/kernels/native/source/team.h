// The threads: made once, they all walk the same function ("single program, multiple data") and
// meet at barriers.
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

typedef struct Team Team;

// What a thread has to do in a phase that is shared out in ranges; see `team_share`.
typedef struct {
    _Alignas(64) atomic_int taken[2]; // of its own range, in this phase and in the next one
    int phases;                       // how many there were
} Share;

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
    Share *shares; // [threads]
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

// A phase whose `total` pieces are cut into as many ranges as there are threads. A thread goes
// through its own range from front to back, so that what it reads lies together and the next of it
// is already on its way; then it helps the others.
//
//   thread 0 ────►│        ╎ 0 helps out ─►│
//   0             total / 2                total
typedef struct {
    Team *team;
    int thread;
    int phase;
    int total;
    int step;   // pieces that are taken at once
    int helped; // ranges that are done
} Sharing;

static inline Sharing team_share(Team *team, int thread, int total, int step) {
    Share *own = team->shares + thread;
    int phase = own->phases++ & 1;
    // of the phase after this one, which nobody enters before the next barrier
    atomic_store_explicit(&own->taken[!phase], 0, memory_order_relaxed);
    return (Sharing){team, thread, phase, total, step, 0};
}

static inline int share_begin(const Sharing *s, int thread) {
    return (int)((int64_t)s->total * thread / s->team->threads);
}

// The next pieces, first to last; 0: there are no more.
static inline int share_take(Sharing *s, int *first, int *last) {
    for (; s->helped < s->team->threads; s->helped++) {
        int owner = (s->thread + s->helped) % s->team->threads;
        int end = share_begin(s, owner + 1);
        atomic_int *taken = &s->team->shares[owner].taken[s->phase];
        *first = share_begin(s, owner)
                + atomic_fetch_add_explicit(taken, s->step, memory_order_relaxed);
        if (*first >= end) continue;
        *last = *first + s->step < end ? *first + s->step : end;
        return 1;
    }
    return 0;
}
