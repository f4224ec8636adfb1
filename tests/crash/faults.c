/* LD_PRELOAD shim: a disk that fails on command.
 *
 * FAULTS_CONTROL names a file of 16 rules of 64 bytes, shared by mapping between the test and every process it
 * started, so that a running server can be told "fail the next fdatasync" and, later, "all is well again". faults.py
 * writes the rules. A rule applies to operations on files whose path contains its text; it lets `skip` of them pass,
 * then acts on `count` of them (for ever if negative). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { WRITE = 1, SYNC = 2, ALLOCATE = 4, READ = 8 };
enum { OFF = 0, FAIL = 1, TEAR = 2, DELAY = 3, JITTER = 4, DIE = 5 };
enum { RULES = 16 };

struct rule {
    char text[24];
    uint32_t operations;
    _Atomic uint32_t action; /* written last by the test */
    _Atomic int64_t skip;
    _Atomic int64_t count;
    int64_t argument; /* FAIL: errno; TEAR: bytes that still get written; DELAY, JITTER: microseconds */
    _Atomic int64_t hits;
};
_Static_assert(sizeof(struct rule) == 64, "faults.py relies on the layout");

static struct rule *rules;

/* Also called by a process that was forked off one without rules, and got its variables afterwards. */
__attribute__((constructor)) void faults_attach(void) {
    const char *path = getenv("FAULTS_CONTROL");
    if (!path) return;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        perror("faults: cannot open the control file");
        _exit(99);
    }
    void *mapped = mmap(NULL, RULES * sizeof(struct rule), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped == MAP_FAILED) _exit(99);
    rules = mapped;
}

static int armed(void) {
    if (!rules) return 0;
    for (int i = 0; i < RULES; i++)
        if (atomic_load(&rules[i].action) != OFF) return 1;
    return 0;
}

static int path_of(int fd, char *path, size_t size) {
    char link[32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, size - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return 1;
}

static void rest(int64_t us) {
    struct timespec left = {us / 1000000, us % 1000000 * 1000};
    while (nanosleep(&left, &left) != 0) {}
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* One off the count, which stays at 0 when it gets there; a negative one never does. */
static int take(_Atomic int64_t *count) {
    int64_t left = atomic_load(count);
    while (left > 0 && !atomic_compare_exchange_weak(count, &left, left - 1)) {}
    return left != 0;
}

/* Counts the operation against every rule. Delays are served here; the first rule that fails, tears or kills wins. */
static struct rule *consult(int fd, uint32_t operation) {
    char path[PATH_MAX];
    struct rule *chosen = NULL;
    int saved = errno;
    if (!armed() || !path_of(fd, path, sizeof path)) goto done;
    for (int i = 0; i < RULES; i++) {
        struct rule *rule = &rules[i];
        uint32_t action = atomic_load(&rule->action);
        if (action == OFF || !(rule->operations & operation) || !strstr(path, rule->text)) continue;
        if (take(&rule->skip)) continue;
        if (!take(&rule->count)) continue;
        atomic_fetch_add(&rule->hits, 1);
        if (action == DELAY) rest(rule->argument);
        else if (action == JITTER) rest(random() % (rule->argument + 1));
        else if (!chosen) chosen = rule;
    }
done:
    errno = saved;
    return chosen;
}

static ssize_t (*real_pwrite)(int, const void *, size_t, off64_t);

/* What a failing disk does to a write: refuses it, or takes part of it and the machine stops. */
static ssize_t broken_write(struct rule *rule, int fd, const void *data, size_t size, off64_t at) {
    if (rule->action == FAIL) {
        errno = (int)rule->argument;
        return -1;
    }
    size_t part = (size_t)rule->argument < size ? (size_t)rule->argument : size;
    if (!real_pwrite) real_pwrite = dlsym(RTLD_NEXT, "pwrite64");
    if (rule->action == TEAR) real_pwrite(fd, data, part, at < 0 ? lseek64(fd, 0, SEEK_CUR) : at);
    die();
    return -1;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define POSITIONED_WRITE(name, offset_type) \
    ssize_t name(int fd, const void *data, size_t size, offset_type at) { \
        REAL(name); \
        struct rule *rule = consult(fd, WRITE); \
        return rule ? broken_write(rule, fd, data, size, at) : real(fd, data, size, at); \
    }

#define GATHERED_WRITE(name, offset_type) \
    ssize_t name(int fd, const struct iovec *parts, int count, offset_type at) { \
        REAL(name); \
        struct rule *rule = consult(fd, WRITE); \
        return rule ? broken_write(rule, fd, parts[0].iov_base, parts[0].iov_len, at) : real(fd, parts, count, at); \
    }

POSITIONED_WRITE(pwrite, off_t)
POSITIONED_WRITE(pwrite64, off64_t)
GATHERED_WRITE(pwritev, off_t)
GATHERED_WRITE(pwritev64, off64_t)

#define FLAGGED_WRITE(name, offset_type) \
    ssize_t name(int fd, const struct iovec *parts, int count, offset_type at, int flags) { \
        REAL(name); \
        struct rule *rule = consult(fd, WRITE); \
        if (rule) return broken_write(rule, fd, parts[0].iov_base, parts[0].iov_len, at); \
        return real(fd, parts, count, at, flags); \
    }

FLAGGED_WRITE(pwritev2, off_t)
FLAGGED_WRITE(pwritev64v2, off64_t)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    struct rule *rule = consult(fd, WRITE);
    return rule ? broken_write(rule, fd, data, size, -1) : real(fd, data, size);
}

#define SYNCING(name) \
    int name(int fd) { \
        REAL(name); \
        struct rule *rule = consult(fd, SYNC); \
        if (!rule) return real(fd); \
        if (rule->action != FAIL) die(); \
        errno = (int)rule->argument; \
        return -1; \
    }

SYNCING(fsync)
SYNCING(fdatasync)

/* posix_fallocate returns its error, fallocate sets errno. */
#define ALLOCATING(name, offset_type) \
    int name(int fd, offset_type at, offset_type size) { \
        REAL(name); \
        struct rule *rule = consult(fd, ALLOCATE); \
        if (rule && rule->action != FAIL) die(); \
        return rule ? (int)rule->argument : real(fd, at, size); \
    }

#define ALLOCATING_BY_MODE(name, offset_type) \
    int name(int fd, int mode, offset_type at, offset_type size) { \
        REAL(name); \
        struct rule *rule = consult(fd, ALLOCATE); \
        if (!rule) return real(fd, mode, at, size); \
        if (rule->action != FAIL) die(); \
        errno = (int)rule->argument; \
        return -1; \
    }

ALLOCATING(posix_fallocate, off_t)
ALLOCATING(posix_fallocate64, off64_t)
ALLOCATING_BY_MODE(fallocate, off_t)
ALLOCATING_BY_MODE(fallocate64, off64_t)

#define POSITIONED_READ(name, offset_type) \
    ssize_t name(int fd, void *data, size_t size, offset_type at) { \
        REAL(name); \
        struct rule *rule = consult(fd, READ); \
        if (!rule) return real(fd, data, size, at); \
        if (rule->action != FAIL) die(); \
        errno = (int)rule->argument; \
        return -1; \
    }

POSITIONED_READ(pread, off_t)
POSITIONED_READ(pread64, off64_t)
