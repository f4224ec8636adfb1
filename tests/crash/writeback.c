/* LD_PRELOAD shim: the page cache and write-back of Linux, for files whose path contains WRITEBACK_TEXT.
 *
 * Writes reach the real file at once, where readers find them as they would in the page cache. Every write, truncation
 * and sync is also appended to the log file WRITEBACK_LOG. From that log writeback.py computes what the disk holds
 * after a power cut: everything synced, and of the rest any subset of sectors.
 *
 * Write-back errors are reported as Linux 4.13 and newer do (errseq_t): once to each open file description that was
 * open when the error happened, and to one opened later only if the error was reported to no other before. Descriptors
 * made by dup() share a description. The data of the failed pages stays readable in the cache, is clean, and is never
 * written to the disk.
 *
 * WRITEBACK_CONTROL names a file with `struct control`, mapped by the test and by every process that it starts. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { WRITE = 1, SYNC = 2, LOST = 3, TRUNCATE = 4, CREATE = 5 };
enum { FAIL_ANY = 0, FAIL_OVERTAKEN = 1 };
enum { INODES = 4096, DESCRIPTORS = 65536, DESCRIPTIONS = 65536, PENDING = 65536 };

struct inode {
    _Atomic uint64_t number; /* 0: free */
    uint32_t errors;         /* write-back errors so far */
    uint32_t seen;           /* whether the last one was reported */
};

struct control {
    _Atomic uint64_t next_id;
    uint64_t random;           /* state of the generator; seeded by the test */
    int64_t sync_us_max;       /* every sync takes a random time up to this */
    _Atomic int64_t fail_skip; /* syncs to let pass before write-back fails */
    _Atomic int64_t fail_count;
    int64_t fail_mode; /* FAIL_ANY: a random part of what is not synced; FAIL_OVERTAKEN: the oldest write, at the sync
                          of another thread */
    _Atomic int64_t failures;
    int64_t die; /* whether the process is killed when a sync has reported an error */
    struct inode inodes[INODES];
};
_Static_assert(sizeof(struct inode) == 16 && offsetof(struct control, inodes) == 64, "writeback.py relies on it");

struct record {
    uint32_t kind, path_bytes;
    uint64_t id, at, data_bytes;
};

struct description {
    struct inode *inode;
    uint32_t sampled; /* how many of the inode's errors it has reported */
    char *path;
};

struct pending {
    struct inode *inode;
    uint64_t id;
    long thread;
};

static struct control *control;
static const char *tracked_text;
static int log_fd = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct description descriptions[DESCRIPTIONS];
static int description_count = 1;
static int description_of[DESCRIPTORS]; /* 0: not tracked */
static struct pending pending[PENDING];
static size_t pending_count;

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static void fail_test(const char *what) {
    perror(what);
    _exit(99);
}

/* At the first open() after the variables are set: a forked server gets them after it has loaded this library. */
static int attached(void) {
    if (control) return 1;
    const char *path = getenv("WRITEBACK_CONTROL"), *log = getenv("WRITEBACK_LOG"), *text = getenv("WRITEBACK_TEXT");
    if (!path || !log || !text) return 0;
    pthread_mutex_lock(&lock);
    if (!control) {
        int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
        if (fd < 0) fail_test("writeback: control file");
        void *mapped = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (mapped == MAP_FAILED) fail_test("writeback: control file");
        syscall(SYS_close, fd);
        log_fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CLOEXEC);
        if (log_fd < 0) fail_test("writeback: log");
        tracked_text = text;
        control = mapped;
    }
    pthread_mutex_unlock(&lock);
    return 1;
}

static void append_record(uint32_t kind, const char *path, uint64_t id, uint64_t at, const void *data, size_t size) {
    struct record head = {kind, (uint32_t)strlen(path), id, at, size};
    struct iovec parts[3] = {{&head, sizeof head}, {(void *)path, head.path_bytes}, {(void *)data, size}};
    if (syscall(SYS_writev, log_fd, parts, 3) != (ssize_t)(sizeof head + head.path_bytes + size))
        fail_test("writeback: log");
}

static uint64_t draw(uint64_t limit) {
    uint64_t x = control->random ? control->random : 88172645463325252ULL;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    control->random = x;
    return x % limit;
}

static struct inode *inode_of(int fd) {
    struct stat status;
    if (fstat(fd, &status) != 0) return NULL;
    for (uint64_t i = 0; i < INODES; i++) {
        struct inode *inode = &control->inodes[(status.st_ino + i) % INODES];
        uint64_t free_number = 0;
        if (atomic_load(&inode->number) == status.st_ino) return inode;
        if (atomic_compare_exchange_strong(&inode->number, &free_number, status.st_ino)) return inode;
        if (free_number == status.st_ino) return inode;
    }
    return NULL;
}

static int opened(int fd, const char *path, int flags) {
    if (fd < 0 || fd >= DESCRIPTORS) return fd;
    int saved = errno;
    description_of[fd] = 0;
    if (attached() && strstr(path, tracked_text)) {
        char link[32], resolved[PATH_MAX];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, resolved, sizeof resolved - 1);
        if (length < 0) fail_test("writeback: readlink");
        resolved[length] = 0;
        pthread_mutex_lock(&lock);
        struct inode *inode = inode_of(fd);
        if (!inode || description_count == DESCRIPTIONS) fail_test("writeback: too many files");
        if (flags & O_EXCL) { /* a new file, whose inode number may have been another's */
            inode->errors = inode->seen = 0;
            append_record(CREATE, resolved, atomic_load(&control->next_id), 0, NULL, 0);
        }
        struct description *found = &descriptions[description_count];
        found->inode = inode;
        found->sampled = inode->errors && !inode->seen ? inode->errors - 1 : inode->errors;
        found->path = strdup(resolved);
        description_of[fd] = description_count++;
        pthread_mutex_unlock(&lock);
    }
    errno = saved;
    return fd;
}

#define OPENING(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = va_arg(more, mode_t); \
        va_end(more); \
        return opened(real(path, flags, mode), path, flags); \
    }

#define OPENING_AT(name) \
    int name(int directory, const char *path, int flags, ...) { \
        REAL(name); \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = va_arg(more, mode_t); \
        va_end(more); \
        return opened(real(directory, path, flags, mode), path, flags); \
    }

OPENING(open)
OPENING(open64)
OPENING_AT(openat)
OPENING_AT(openat64)

static int duplicated(int from, int to) {
    if (to >= 0 && to < DESCRIPTORS) description_of[to] = from < DESCRIPTORS ? description_of[from] : 0;
    return to;
}

int dup(int fd) {
    REAL(dup);
    return duplicated(fd, real(fd));
}

int dup2(int fd, int to) {
    REAL(dup2);
    return duplicated(fd, real(fd, to));
}

int dup3(int fd, int to, int flags) {
    REAL(dup3);
    return duplicated(fd, real(fd, to, flags));
}

#define CONTROLLING(name) \
    int name(int fd, int command, ...) { \
        REAL(name); \
        va_list more; \
        va_start(more, command); \
        void *argument = va_arg(more, void *); \
        va_end(more); \
        int result = real(fd, command, argument); \
        return command == F_DUPFD || command == F_DUPFD_CLOEXEC ? duplicated(fd, result) : result; \
    }

CONTROLLING(fcntl)
CONTROLLING(fcntl64)

int close(int fd) {
    REAL(close);
    if (fd >= 0 && fd < DESCRIPTORS) description_of[fd] = 0;
    return real(fd);
}

static struct description *tracked(int fd) {
    if (!control || fd < 0 || fd >= DESCRIPTORS || !description_of[fd]) return NULL;
    return &descriptions[description_of[fd]];
}

static uint64_t add_pending(struct description *file) {
    if (pending_count == PENDING) fail_test("writeback: too many unsynced writes");
    uint64_t id = atomic_fetch_add(&control->next_id, 1) + 1;
    pending[pending_count++] = (struct pending){file->inode, id, syscall(SYS_gettid)};
    return id;
}

static void remove_pending(size_t index) {
    memmove(&pending[index], &pending[index + 1], (pending_count - index - 1) * sizeof *pending);
    pending_count--;
}

/* Recorded before it is done: a process that is killed in between may well have issued it. */
static void record_write(int fd, const void *data, size_t size, off64_t at) {
    struct description *file = tracked(fd);
    if (!file || !size) return;
    pthread_mutex_lock(&lock);
    append_record(WRITE, file->path, add_pending(file), (uint64_t)at, data, size);
    pthread_mutex_unlock(&lock);
}

#define POSITIONED_WRITE(name, offset_type) \
    ssize_t name(int fd, const void *data, size_t size, offset_type at) { \
        REAL(name); \
        record_write(fd, data, size, at); \
        return real(fd, data, size, at); \
    }

POSITIONED_WRITE(pwrite, off_t)
POSITIONED_WRITE(pwrite64, off64_t)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    if (tracked(fd)) record_write(fd, data, size, lseek64(fd, 0, SEEK_CUR));
    return real(fd, data, size);
}

#define TRUNCATING(name, offset_type) \
    int name(int fd, offset_type size) { \
        REAL(name); \
        struct description *file = tracked(fd); \
        if (file) { \
            pthread_mutex_lock(&lock); \
            append_record(TRUNCATE, file->path, add_pending(file), (uint64_t)size, NULL, 0); \
            pthread_mutex_unlock(&lock); \
        } \
        return real(fd, size); \
    }

TRUNCATING(ftruncate, off_t)
TRUNCATING(ftruncate64, off64_t)

static int take(_Atomic int64_t *count) {
    int64_t left = atomic_load(count);
    while (left > 0 && !atomic_compare_exchange_weak(count, &left, left - 1)) {}
    return left != 0;
}

/* Write-back of a part of what was written before `id` fails: it never reaches the disk. */
static void fail_writeback(struct description *file, uint64_t id) {
    size_t count = 0, oldest = PENDING;
    for (size_t i = 0; i < pending_count; i++)
        if (pending[i].inode == file->inode && pending[i].id <= id) {
            if (oldest == PENDING) oldest = i;
            count++;
        }
    if (!count || atomic_load(&control->fail_count) == 0) return;
    if (control->fail_mode == FAIL_OVERTAKEN && pending[oldest].thread == syscall(SYS_gettid)) return;
    if (take(&control->fail_skip) || !take(&control->fail_count)) return;
    size_t certain = control->fail_mode == FAIL_OVERTAKEN ? 0 : draw(count), seen = 0;
    for (size_t i = 0; i < pending_count;) {
        if (pending[i].inode != file->inode || pending[i].id > id) {
            i++;
        } else if (seen++ == certain || (control->fail_mode == FAIL_ANY && draw(2))) {
            append_record(LOST, file->path, pending[i].id, 0, NULL, 0);
            remove_pending(i);
        } else {
            i++;
        }
    }
    file->inode->errors++;
    file->inode->seen = 0;
    atomic_fetch_add(&control->failures, 1);
}

static int sync_file(struct description *file) {
    uint64_t id = atomic_load(&control->next_id); /* what is written from now on is not part of this sync */
    pthread_mutex_lock(&lock);
    int64_t us = control->sync_us_max ? (int64_t)draw((uint64_t)control->sync_us_max + 1) : 0;
    pthread_mutex_unlock(&lock);
    struct timespec left = {us / 1000000, us % 1000000 * 1000};
    while (us && nanosleep(&left, &left) != 0) {}
    pthread_mutex_lock(&lock);
    fail_writeback(file, id);
    int failed = file->sampled != file->inode->errors;
    if (failed) {
        file->sampled = file->inode->errors;
        file->inode->seen = 1;
    } else {
        append_record(SYNC, file->path, id, 0, NULL, 0);
        for (size_t i = 0; i < pending_count;)
            if (pending[i].inode == file->inode && pending[i].id <= id) remove_pending(i);
            else i++;
    }
    pthread_mutex_unlock(&lock);
    if (failed && control->die) {
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    if (failed) errno = EIO;
    return failed ? -1 : 0;
}

#define SYNCING(name) \
    int name(int fd) { \
        REAL(name); \
        struct description *file = tracked(fd); \
        return file ? sync_file(file) : real(fd); \
    }

SYNCING(fsync)
SYNCING(fdatasync)
