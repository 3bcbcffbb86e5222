/* A preloaded library that counts the calls by which a process changes files under one folder, and at one of them kills
 * the process, lets the call fail, or makes it slow. It is told so by environment variables, which are read at each call:
 *
 *   FAULTY_FOLDER  absolute path; calls on files elsewhere are not counted
 *   FAULTY_EXCEPT  a folder in it, on whose files calls are not counted either; empty for none
 *   FAULTY_RANK    only the process whose RANK is this one (or has none, where this is empty); "*" for all
 *   FAULTY_AT      number of the call, from 1; 0 to count only
 *   FAULTY_TIMES   how many calls fail, from that one on
 *   FAULTY_ERRNO   0: SIGKILL, of a write after its first half; else the call fails with this error
 *   FAULTY_CALLS   names of the calls that count, such as "fsync rename"; empty for all that change files. Those that
 *                  read are "look" (a file is opened, but not made) and "read": they count only where they are named
 *   FAULTY_SLOW    a folder on whose files each counted call takes FAULTY_DELAY milliseconds longer
 *   FAULTY_LOG     file that gets a line for each counted call, before it is made
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static pid_t counting;
static long count;

static const char *get(const char *name) {
    const char *value = getenv(name);
    return value ? value : "";
}

static int is_inside(const char *path, const char *folder) {
    size_t length = strlen(folder);
    return length && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static int is_named(const char *call, const char *calls) {
    size_t length = strlen(call);
    for (const char *found = calls; (found = strstr(found, call)); found += length)
        if ((found == calls || found[-1] == ' ') && (found[length] == ' ' || !found[length]))
            return 1;
    return 0;
}

static int reads(const char *call) { return !strcmp(call, "look") || !strcmp(call, "read"); }

static int named(int descriptor, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    return length > 0 && path[0] == '/';
}

static void absolute(int folder, const char *path, char *found) {
    char base[PATH_MAX] = "";
    if (path[0] != '/' && folder == AT_FDCWD && !getcwd(base, sizeof base))
        base[0] = 0;
    if (path[0] != '/' && folder != AT_FDCWD)
        named(folder, base);
    if (snprintf(found, PATH_MAX, "%s%s%s", base, path[0] == '/' ? "" : "/", path) >= PATH_MAX)
        found[0] = 0;
}

static int counts(const char *call, const char *path) {
    const char *rank = get("FAULTY_RANK"), *calls = get("FAULTY_CALLS");
    if (!is_inside(path, get("FAULTY_FOLDER")) || is_inside(path, get("FAULTY_EXCEPT")))
        return 0;
    if (strcmp(rank, "*") && strcmp(rank, get("RANK")))
        return 0;
    return calls[0] ? is_named(call, calls) : !reads(call);
}

/* Whether this call is the one; the caller then lets it fail, or is killed. */
static int is_due(const char *call, const char *path) {
    int before = errno;
    if (!counts(call, path))
        return errno = before, 0;
    if (counting != getpid()) {
        counting = getpid();
        count = 0;
    }
    long number = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    const char *log = get("FAULTY_LOG");
    if (log[0]) {
        char line[PATH_MAX + 64];
        int length = snprintf(line, sizeof line, "%ld %s %s\n", number, call, path + strlen(get("FAULTY_FOLDER")));
        int file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0666);
        syscall(SYS_write, file, line, length);
        syscall(SYS_close, file);
    }
    long delay = atol(get("FAULTY_DELAY")), at = atol(get("FAULTY_AT"));
    struct timespec pause = {delay / 1000, delay % 1000 * 1000000};
    if (delay && is_inside(path, get("FAULTY_SLOW")))
        nanosleep(&pause, NULL);
    errno = before;
    return at && number >= at && number < at + atol(get("FAULTY_TIMES"));
}

static int fail(void) {
    int error = atoi(get("FAULTY_ERRNO"));
    if (!error)
        syscall(SYS_kill, getpid(), SIGKILL);
    errno = error;
    return -1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define ON_PATH(name, folder, path, ...)                                                                               \
    char found[PATH_MAX];                                                                                              \
    absolute(folder, path, found);                                                                                     \
    return is_due(#name, found) ? fail() : REAL(name)(__VA_ARGS__)
#define ON_FILE(name, descriptor, ...)                                                                                 \
    char found[PATH_MAX];                                                                                              \
    return named(descriptor, found) && is_due(#name, found) ? fail() : REAL(name)(__VA_ARGS__)

ssize_t write(int file, const void *bytes, size_t size) {
    char found[PATH_MAX];
    if (file > 2 && named(file, found) && is_due("write", found)) {
        if (!atoi(get("FAULTY_ERRNO")))
            syscall(SYS_write, file, bytes, size / 2);
        return fail();
    }
    return REAL(write)(file, bytes, size);
}

ssize_t pwrite64(int file, const void *bytes, size_t size, off64_t at) {
    char found[PATH_MAX];
    if (named(file, found) && is_due("write", found)) {
        if (!atoi(get("FAULTY_ERRNO")))
            syscall(SYS_pwrite64, file, bytes, size / 2, at);
        return fail();
    }
    return REAL(pwrite64)(file, bytes, size, at);
}

ssize_t pwrite(int file, const void *bytes, size_t size, off_t at) { return pwrite64(file, bytes, size, at); }
ssize_t writev(int file, const struct iovec *parts, int n) { ON_FILE(writev, file, file, parts, n); }
int fsync(int file) { ON_FILE(fsync, file, file); }
int fdatasync(int file) { ON_FILE(fdatasync, file, file); }
int ftruncate64(int file, off64_t size) { ON_FILE(ftruncate64, file, file, size); }
int ftruncate(int file, off_t size) { ON_FILE(ftruncate, file, file, size); }
int link(const char *from, const char *to) { ON_PATH(link, AT_FDCWD, to, from, to); }
int linkat(int of, const char *from, int at, const char *to, int flags) {
    ON_PATH(linkat, at, to, of, from, at, to, flags);
}
int rename(const char *from, const char *to) { ON_PATH(rename, AT_FDCWD, to, from, to); }
int renameat(int of, const char *from, int at, const char *to) { ON_PATH(renameat, at, to, of, from, at, to); }
int unlink(const char *path) { ON_PATH(unlink, AT_FDCWD, path, path); }
int unlinkat(int folder, const char *path, int flags) { ON_PATH(unlinkat, folder, path, folder, path, flags); }
int rmdir(const char *path) { ON_PATH(rmdir, AT_FDCWD, path, path); }
int mkdir(const char *path, mode_t mode) { ON_PATH(mkdir, AT_FDCWD, path, path, mode); }
int mkdirat(int folder, const char *path, mode_t mode) { ON_PATH(mkdirat, folder, path, folder, path, mode); }

#define READ_FILE(name, descriptor, ...)                                                                               \
    char found[PATH_MAX];                                                                                              \
    if (is_named("read", get("FAULTY_CALLS")) && named(descriptor, found) && is_due("read", found))                    \
        return fail();                                                                                                 \
    return REAL(name)(__VA_ARGS__)

ssize_t read(int file, void *room, size_t size) { READ_FILE(read, file, file, room, size); }
ssize_t pread64(int file, void *room, size_t size, off64_t at) { READ_FILE(pread64, file, file, room, size, at); }
ssize_t pread(int file, void *room, size_t size, off_t at) { return pread64(file, room, size, at); }
ssize_t preadv64(int file, const struct iovec *rooms, int n, off64_t at) {
    READ_FILE(preadv64, file, file, rooms, n, at);
}
ssize_t preadv(int file, const struct iovec *rooms, int n, off_t at) { return preadv64(file, rooms, n, at); }
ssize_t preadv64v2(int file, const struct iovec *rooms, int n, off64_t at, int flags) {
    READ_FILE(preadv64v2, file, file, rooms, n, at, flags);
}
ssize_t preadv2(int file, const struct iovec *rooms, int n, off_t at, int flags) {
    return preadv64v2(file, rooms, n, at, flags);
}

/* Opening a file changes something where it makes or empties it. */
static int is_opening_due(int folder, const char *path, int flags) {
    char found[PATH_MAX];
    absolute(folder, path, found);
    return is_due(flags & (O_CREAT | O_TRUNC) ? "open" : "look", found);
}

#define MODE(flags)                                                                                                    \
    mode_t mode = 0;                                                                                                   \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                                                                             \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode = va_arg(more, mode_t);                                                                                   \
        va_end(more);                                                                                                  \
    }

int open64(const char *path, int flags, ...) {
    MODE(flags)
    return is_opening_due(AT_FDCWD, path, flags) ? fail() : syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

int open(const char *path, int flags, ...) {
    MODE(flags)
    return is_opening_due(AT_FDCWD, path, flags) ? fail() : syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

int openat(int folder, const char *path, int flags, ...) {
    MODE(flags)
    return is_opening_due(folder, path, flags) ? fail() : syscall(SYS_openat, folder, path, flags, mode);
}

int openat64(int folder, const char *path, int flags, ...) {
    MODE(flags)
    return is_opening_due(folder, path, flags) ? fail() : syscall(SYS_openat, folder, path, flags, mode);
}
