/* LD_PRELOAD shim: a disk of limited size, and a wall clock that can be set.
 *
 * WORLD_CONTROL names a file of two numbers, shared by mapping between the test and every process it started:
 * the size of the disk in bytes (0: unlimited) and what is added to the wall clock in nanoseconds. WORLD_ROOT is the
 * directory that lies on that disk; the sizes of its files are what is used. world.py writes the numbers.
 *
 * It can be loaded together with faults.c: each calls the next one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 4096 };

struct world {
    _Atomic int64_t disk_bytes;
    _Atomic int64_t clock_ns;
};

static struct world *_Atomic world;
static char root[PATH_MAX];
static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;
static int64_t counted;

/* Looked up with each call until it is there: a process may get its variables after it was forked. */
static struct world *attached(void) {
    struct world *found = atomic_load(&world);
    if (found) return found;
    const char *control = getenv("WORLD_CONTROL"), *directory = getenv("WORLD_ROOT");
    if (!control || !directory) return NULL;
    int fd = open(control, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        perror("world: cannot open the control file");
        _exit(99);
    }
    void *mapped = mmap(NULL, sizeof(struct world), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped == MAP_FAILED) _exit(99);
    snprintf(root, sizeof root, "%s", directory);
    atomic_store(&world, mapped);
    return mapped;
}

static int add_size(const char *path, const struct stat *found, int kind, struct FTW *place) {
    (void)path, (void)place;
    if (kind == FTW_F) counted += found->st_size;
    return 0;
}

static int64_t free_bytes(struct world *found) {
    pthread_mutex_lock(&counting);
    counted = 0;
    nftw(root, add_size, 16, FTW_PHYS);
    int64_t used = counted;
    pthread_mutex_unlock(&counting);
    int64_t left = atomic_load(&found->disk_bytes) - used;
    return left > 0 ? left : 0;
}

static int lies_on_disk(int fd) {
    char link[32], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return strncmp(path, root, strlen(root)) == 0;
}

/* Whether a file may reach to `end`. */
static int has_room(int fd, int64_t end) {
    struct world *found = attached();
    struct stat file;
    int saved = errno, room = 1;
    if (found && atomic_load(&found->disk_bytes) && fstat(fd, &file) == 0 && S_ISREG(file.st_mode) &&
        end > file.st_size && lies_on_disk(fd))
        room = end - file.st_size <= free_bytes(found);
    errno = room ? saved : ENOSPC;
    return room;
}

static int64_t total(const struct iovec *parts, int count) {
    int64_t size = 0;
    for (int i = 0; i < count; i++) size += (int64_t)parts[i].iov_len;
    return size;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define POSITIONED_WRITE(name, offset_type) \
    ssize_t name(int fd, const void *data, size_t size, offset_type at) { \
        REAL(name); \
        return has_room(fd, at + (int64_t)size) ? real(fd, data, size, at) : -1; \
    }

#define GATHERED_WRITE(name, offset_type) \
    ssize_t name(int fd, const struct iovec *parts, int count, offset_type at) { \
        REAL(name); \
        return has_room(fd, at + total(parts, count)) ? real(fd, parts, count, at) : -1; \
    }

#define FLAGGED_WRITE(name, offset_type) \
    ssize_t name(int fd, const struct iovec *parts, int count, offset_type at, int flags) { \
        REAL(name); \
        return has_room(fd, at + total(parts, count)) ? real(fd, parts, count, at, flags) : -1; \
    }

POSITIONED_WRITE(pwrite, off_t)
POSITIONED_WRITE(pwrite64, off64_t)
GATHERED_WRITE(pwritev, off_t)
GATHERED_WRITE(pwritev64, off64_t)
FLAGGED_WRITE(pwritev2, off_t)
FLAGGED_WRITE(pwritev64v2, off64_t)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    int64_t at = attached() ? lseek64(fd, 0, SEEK_CUR) : -1;
    return at < 0 || has_room(fd, at + (int64_t)size) ? real(fd, data, size) : -1;
}

/* posix_fallocate returns its error, fallocate sets errno. */
#define ALLOCATING(name, offset_type) \
    int name(int fd, offset_type at, offset_type size) { \
        REAL(name); \
        return has_room(fd, at + size) ? real(fd, at, size) : ENOSPC; \
    }

#define ALLOCATING_BY_MODE(name, offset_type) \
    int name(int fd, int mode, offset_type at, offset_type size) { \
        REAL(name); \
        return has_room(fd, at + size) ? real(fd, mode, at, size) : -1; \
    }

ALLOCATING(posix_fallocate, off_t)
ALLOCATING(posix_fallocate64, off64_t)
ALLOCATING_BY_MODE(fallocate, off_t)
ALLOCATING_BY_MODE(fallocate64, off64_t)

#define MEASURED(name, kind) \
    int name(const char *path, struct kind *space) { \
        REAL(name); \
        int outcome = real(path, space); \
        struct world *found = attached(); \
        if (outcome == 0 && found && atomic_load(&found->disk_bytes)) { \
            space->f_bsize = space->f_frsize = BLOCK; \
            space->f_blocks = (uint64_t)atomic_load(&found->disk_bytes) / BLOCK; \
            space->f_bfree = space->f_bavail = (uint64_t)free_bytes(found) / BLOCK; \
        } \
        return outcome; \
    }

MEASURED(statvfs, statvfs)
MEASURED(statvfs64, statvfs64)

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int outcome = real(clock, now);
    if (outcome == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        struct world *found = attached();
        int64_t added_ns = found ? atomic_load(&found->clock_ns) : 0;
        int64_t at_ns = now->tv_sec * 1000000000 + now->tv_nsec + added_ns;
        now->tv_sec = at_ns / 1000000000;
        now->tv_nsec = at_ns % 1000000000;
    }
    return outcome;
}
