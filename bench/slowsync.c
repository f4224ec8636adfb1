/* LD_PRELOAD shim: a disk whose syncs take longer. SLOWSYNC_MS is added to every fdatasync, fsync and msync.
 * By default overlapping syncs each wait their own time, as on a device with a queue; SLOWSYNC_SERIAL=1 lets only one
 * wait at a time, as on a device that handles one flush after the other. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <time.h>

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
static struct timespec delay;
static int serial;

__attribute__((constructor)) static void configure(void) {
    const char *ms = getenv("SLOWSYNC_MS"), *mode = getenv("SLOWSYNC_SERIAL");
    long ns = ms ? (long)(atof(ms) * 1e6) : 0;
    delay.tv_sec = ns / 1000000000;
    delay.tv_nsec = ns % 1000000000;
    serial = mode && *mode == '1';
}

static void dawdle(void) {
    struct timespec rest = delay;
    if (serial) pthread_mutex_lock(&one_at_a_time);
    while (nanosleep(&rest, &rest) != 0) {}
    if (serial) pthread_mutex_unlock(&one_at_a_time);
}

int fdatasync(int fd) {
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    dawdle();
    return real(fd);
}

int fsync(int fd) {
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    dawdle();
    return real(fd);
}

int msync(void *address, size_t length, int flags) {
    static int (*real)(void *, size_t, int);
    if (!real) real = (int (*)(void *, size_t, int))dlsym(RTLD_NEXT, "msync");
    dawdle();
    return real(address, length, flags);
}
