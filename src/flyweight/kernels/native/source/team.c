// A thread that waits first spins, because the next phase is microseconds away, and then sleeps,
// because the next call may never come and the core may be needed by others.
#define _GNU_SOURCE
#include "team.h"

#include <sched.h>
#include <stdlib.h>

#define SPINS 4000

static inline void pause_briefly(void) {
#if defined(__aarch64__)
    // a few dozen cycles; `yield` is none at all on most cores
    __asm__ volatile("isb" ::: "memory");
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void wait_for_change(Team *team, atomic_int *word, int old) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != old) return;
        pause_briefly();
    }
    pthread_mutex_lock(&team->sleeping);
    atomic_fetch_add(&team->sleepers, 1);
    while (atomic_load(word) == old) pthread_cond_wait(&team->changed, &team->sleeping);
    atomic_fetch_sub(&team->sleepers, 1);
    pthread_mutex_unlock(&team->sleeping);
}

// Sequentially consistent with the sleeper's count: either it is seen here, or the sleeper sees the
// change.
static void change(Team *team, atomic_int *word) {
    atomic_fetch_add(word, 1);
    if (!atomic_load(&team->sleepers)) return;
    pthread_mutex_lock(&team->sleeping);
    pthread_cond_broadcast(&team->changed);
    pthread_mutex_unlock(&team->sleeping);
}

void team_barrier(Team *team) {
    if (team->threads == 1) {
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        return;
    }
    int generation = atomic_load_explicit(&team->generation, memory_order_acquire);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == team->threads - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        change(team, &team->generation);
    } else {
        wait_for_change(team, &team->generation, generation);
    }
}

typedef struct { Team *team; int thread; } Place;

static void pin(Team *team, int thread) {
#if defined(__linux__)
    if (thread >= team->pins) return;
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(team->cores[thread], &cores);
    pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
#else
    (void)team, (void)thread;
#endif
}

static void *live(void *argument) {
    Place place = *(Place *)argument;
    Team *team = place.team;
    free(argument);
    pin(team, place.thread);
    for (int call = 0;; call++) {
        wait_for_change(team, &team->calls, call);
        team->work(team->argument, team, place.thread);
        team_barrier(team);
    }
    return NULL;
}

void team_run(Team *team, Work *work, void *argument) {
    pthread_mutex_lock(&team->entrance);
    team->work = work;
    team->argument = argument;
    atomic_store(&team->next, 0);
    if (team->threads > 1) change(team, &team->calls);
    work(argument, team, 0);
    team_barrier(team);
    pthread_mutex_unlock(&team->entrance);
}

Team *team_make(int threads, const int32_t *cores) {
    Team *team = aligned_alloc(64, (sizeof(Team) + 63) / 64 * 64);
    Share *shares = aligned_alloc(64, threads * sizeof(Share));
    if (!team || !shares) return NULL;
    *team = (Team){
        .threads = threads, .pins = cores ? threads : 0, .cores = cores, .shares = shares};
    for (int thread = 0; thread < threads; thread++) shares[thread] = (Share){{0, 0}, 0};
    pthread_mutex_init(&team->entrance, NULL);
    pthread_mutex_init(&team->sleeping, NULL);
    pthread_cond_init(&team->changed, NULL);
    for (int thread = 1; thread < threads; thread++) {
        Place *place = malloc(sizeof *place);
        pthread_t id;
        *place = (Place){team, thread};
        if (pthread_create(&id, NULL, live, place)) return NULL;
        pthread_detach(id);
    }
    return team;
}
