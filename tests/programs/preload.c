/* What unmodified programs do with descriptors, one case a name: run on a plain directory without the preload
 * library and on a mount with it, output and files must be the same.
 *
 * usage: preload DIR CASE
 * Prints results of calls, never addresses, numbers of descriptors or times. */
#define _GNU_SOURCE
#include <aio.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
static char path[4096], self[4096];
static const char *dir;

static const char *at(const char *name) {
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static int check(int ok, const char *what) {
    if (ok) return 1;
    printf("failed: %s (%s)\n", what, strerror(errno));
    fflush(stdout);
    exit(1);
}
#define MUST(x) check((x), #x)

static long say(const char *what, long result) {
    if (result < 0)
        printf("%s: %s\n", what, strerror(errno));
    else
        printf("%s: %ld\n", what, result);
    return result;
}
#define SAY(x) say(#x, (long)(x))

static int make(const char *name) {
    int fd = open(at(name), O_CREAT | O_TRUNC | O_WRONLY, 0644);
    MUST(fd >= 0);
    return fd;
}

static int make_rw(const char *name) {
    int fd = open(at(name), O_CREAT | O_TRUNC | O_RDWR, 0644);
    MUST(fd >= 0);
    return fd;
}

/* Writes a text that tells where it was written from. */
static void put(int fd, const char *text) {
    size_t len = strlen(text);
    MUST(write(fd, text, len) == (ssize_t)len);
}

static void fill(unsigned char *to, size_t len, unsigned seed) {
    for (size_t i = 0; i < len; i++) to[i] = (unsigned char)((i + seed) * 2654435761u >> 13);
}

static unsigned char big[3 << 20], back[3 << 20];

static void wait_for(pid_t pid) {
    int status;
    MUST(pid > 0);
    MUST(waitpid(pid, &status, 0) == pid);
    printf("child: %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status));
}

static void sizes(void) {
    int fd = make("sizes");
    size_t done = 0, len = 1;
    fill(big, sizeof big, 1);
    while (done + len < sizeof big) {
        MUST(write(fd, big + done, len) == (ssize_t)len);
        done += len;
        len = len > 700000 ? 3 : len * 3 + 1;
        struct stat st;
        MUST(fstat(fd, &st) == 0);
        MUST(st.st_size == (off_t)done);
    }
    SAY(lseek(fd, 0, SEEK_CUR));
    SAY(write(fd, big, 0));
    SAY(fsync(fd));
    put(fd, "after fsync");
    SAY(fdatasync(fd));
    SAY(close(fd));
    SAY(write(fd, "x", 1));
}

static void seeks(void) {
    int fd = make("seeks");
    put(fd, "0123456789");
    SAY(lseek(fd, 4, SEEK_SET));
    put(fd, "four");
    SAY(lseek(fd, -2, SEEK_CUR));
    put(fd, "XY");
    SAY(lseek(fd, 0, SEEK_END));
    put(fd, "end");
    SAY(lseek(fd, 100000, SEEK_SET));
    put(fd, "far");
    SAY(lseek(fd, -1, SEEK_SET));
    SAY(lseek(fd, -200000, SEEK_CUR));
    SAY(lseek(fd, 1, 77));
    SAY(lseek(fd, 0, SEEK_CUR));
    SAY(lseek(fd, 5, SEEK_END));
    put(fd, "!");
    SAY(pwrite(fd, "pp", 2, 50000));
    SAY(pwrite(fd, "pp", 2, -1));
    SAY(lseek(fd, 0, SEEK_CUR));
    SAY(lseek(fd, 3, SEEK_DATA) >= 0);
    SAY(lseek(fd, 200000, SEEK_DATA));
    SAY(lseek(fd, 0, SEEK_SET));
    put(fd, "begin");
    SAY(close(fd));
}

static void vectors(void) {
    int fd = make("vectors");
    struct iovec parts[1025];
    fill(big, sizeof big, 2);
    for (int i = 0; i < 1025; i++) parts[i] = (struct iovec){big + i * 100, i % 7 ? 100 : 0};
    SAY(writev(fd, parts, 1024));
    SAY(writev(fd, parts, 1025));
    SAY(writev(fd, parts, 0));
    SAY(writev(fd, parts, -1));
    SAY(pwritev(fd, parts, 3, 200000));
    SAY(pwritev(fd, parts, 3, -5));
    SAY(pwritev2(fd, parts, 4, 300000, 0));
    SAY(pwritev2(fd, parts, 4, -1, 0));
    SAY(lseek(fd, 0, SEEK_CUR));
    parts[1].iov_len = SSIZE_MAX;
    parts[2].iov_len = SSIZE_MAX;
    SAY(writev(fd, parts, 3));
    parts[0] = (struct iovec){big, 1000000};
    parts[1] = (struct iovec){big + 1000000, 1};
    parts[2] = (struct iovec){big + 1000001, 1999999};
    SAY(writev(fd, parts, 3));
    SAY(lseek(fd, 0, SEEK_CUR));
    SAY(pwritev2(fd, parts + 1, 1, 7, RWF_DSYNC));
    put(fd, "end");
    SAY(close(fd));
}

/* Unlinked and made again, files get the inode numbers and the memory of others. */
static void reuse(void) {
    char name[16];
    for (int round = 0; round < 200; round++) {
        snprintf(name, sizeof name, "reuse.%d", round % 3);
        int fd = make_rw(name);
        size_t len = 1 + (size_t)round * 7919 % 200000, gap = (size_t)round * 104729 % 300000;
        fill(big, len, (unsigned)round);
        MUST(write(fd, big, len) == (ssize_t)len);
        /* What lies between was never written. */
        MUST(pwrite(fd, "end", 3, (off_t)(len + gap)) == 3);
        memset(back, 0xaa, sizeof back);
        int reader = open(at(name), O_RDONLY);
        MUST(read(reader, back, sizeof back) == (ssize_t)(len + gap + 3));
        MUST(memcmp(back, big, len) == 0);
        for (size_t i = len; i < len + gap; i++) MUST(back[i] == 0);
        MUST(memcmp(back + len + gap, "end", 3) == 0);
        MUST(ftruncate(fd, (off_t)len / 2) == 0 && ftruncate(fd, (off_t)len) == 0);
        memset(back, 0xaa, sizeof back);
        MUST(pread(fd, back, sizeof back, 0) == (ssize_t)len);
        for (size_t i = len / 2; i < len; i++) MUST(back[i] == 0);
        if (round % 2) MUST(unlink(at(name)) == 0);
        /* Without a name too. */
        MUST(pwrite(fd, "unlinked", 8, 0) == 8);
        MUST(pread(reader, back, 8, 0) == 8 && memcmp(back, "unlinked", 8) == 0);
        close(fd);
        if (round % 4) close(reader);
        if (round % 4 == 1) unlink(at(name));
    }
}

static void empty_paths(void) {
    struct stat st;
    struct statx sx;
    int fd = make("empty-paths");
    for (int i = 1; i < 300; i++) {
        put(fd, "0123456789");
        MUST(fstatat(fd, "", &st, AT_EMPTY_PATH) == 0 && st.st_size == i * 10);
        MUST(statx(fd, "", AT_EMPTY_PATH, STATX_SIZE, &sx) == 0 && sx.stx_size == (unsigned)i * 10);
        MUST(stat(at("empty-paths"), &st) == 0 && st.st_size == i * 10);
    }
    SAY(fchownat(fd, "", getuid(), getgid(), AT_EMPTY_PATH));
    put(fd, "after chown");
    SAY(linkat(fd, "", AT_FDCWD, at("empty-paths.link"), AT_EMPTY_PATH));
    put(fd, "after the link");
    SAY(fstatat(AT_FDCWD, at("empty-paths.link"), &st, 0));
    SAY(st.st_size);
    SAY(openat(fd, "", O_RDONLY));
    SAY(close(fd));
}

/* What stat(2) was for programs that were built before glibc 2.33. */
#ifdef __x86_64__
#define OLD "@GLIBC_2.2.5"
#define OLD_AT "@GLIBC_2.4"
enum { OLD_STAT_VERSION = 1 };
#else
#define OLD "@GLIBC_2.17"
#define OLD_AT OLD
enum { OLD_STAT_VERSION = 0 };
#endif
__asm__(".symver old_stat,__xstat64" OLD);
__asm__(".symver old_lstat,__lxstat" OLD);
__asm__(".symver old_fstat,__fxstat64" OLD);
__asm__(".symver old_fstatat,__fxstatat" OLD_AT);
int old_stat(int version, const char *path, struct stat *st), old_lstat(int version, const char *path, struct stat *st);
int old_fstat(int version, int fd, struct stat *st);
int old_fstatat(int version, int base, const char *path, struct stat *st, int flags);

static void old_stats(void) {
    struct stat st;
    int fd = make("old-stats");
    for (int i = 1; i < 100; i++) {
        put(fd, "0123456789");
        MUST(old_fstat(OLD_STAT_VERSION, fd, &st) == 0 && st.st_size == i * 10);
        MUST(old_stat(OLD_STAT_VERSION, at("old-stats"), &st) == 0 && st.st_size == i * 10);
        MUST(old_lstat(OLD_STAT_VERSION, at("old-stats"), &st) == 0 && st.st_size == i * 10);
        MUST(old_fstatat(OLD_STAT_VERSION, AT_FDCWD, at("old-stats"), &st, 0) == 0 && st.st_size == i * 10);
    }
    SAY(close(fd));
    SAY(old_stat(OLD_STAT_VERSION, at("old-stats"), &st));
    SAY(st.st_size);
    SAY(old_stat(OLD_STAT_VERSION, at("nothing"), &st));
    SAY(old_fstat(OLD_STAT_VERSION, fd, &st));
}

static void locks(void) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 100, .l_len = 50};
    int fd = make_rw("locks");
    put(fd, "before");
    SAY(flock(fd, LOCK_EX));
    SAY(fcntl(fd, F_SETLK, &lock));
    for (int i = 0; i < 1000; i++) put(fd, "under a lock\n");
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        int other = open(at("locks"), O_RDWR);
        SAY(flock(other, LOCK_EX | LOCK_NB));
        SAY(fcntl(other, F_SETLK, &lock));
        lock.l_start = 10000;
        SAY(fcntl(other, F_SETLK, &lock));
        SAY(pwrite(other, "child", 5, 10000));
        fflush(stdout);
        _exit(0);
    }
    wait_for(pid);
    put(fd, "parent again");
    lock = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_CUR, .l_start = -20, .l_len = 5};
    SAY(fcntl(fd, F_OFD_SETLK, &lock));
    SAY(lseek(fd, 0, SEEK_CUR));
    SAY(flock(fd, LOCK_UN));
    SAY(close(fd));
}

/* Stores to a mapping that nobody has synced are there for who opens the file again. */
static void mapped_again(void) {
    for (int len = 1; len < 2000000; len = len * 7 + 3) {
        int fd = make_rw("mapped");
        MUST(pwrite(fd, "", 1, len - 1) == 1);
        char *map = mmap(NULL, (size_t)len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        MUST(map != MAP_FAILED);
        memset(map, 'm', (size_t)len);
        int reader = open(at("mapped"), O_RDONLY);
        MUST(pread(reader, back, sizeof back, 0) == len);
        for (int i = 0; i < len; i++) MUST(back[i] == 'm' && map[i] == 'm');
        MUST(munmap(map, (size_t)len) == 0);
        close(reader);
        SAY(close(fd));
    }
}

/* More than the kernel takes in one call. Of memory that was never touched, which is zeros. */
static void longs(void) {
    size_t len = (size_t)3 << 30;
    char *zeros = mmap(NULL, len, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    MUST(zeros != MAP_FAILED);
    int fd = make_rw("longs");
    SAY(write(fd, zeros, len));
    SAY(lseek(fd, 0, SEEK_CUR));
    put(fd, "behind it");
    struct iovec parts[2] = {{zeros, len / 2}, {zeros, len / 2}};
    SAY(ftruncate(fd, 0));
    SAY(lseek(fd, 0, SEEK_SET));
    SAY(writev(fd, parts, 2));
    SAY(pwrite(fd, "x", 1, (off_t)1 << 30));
    SAY(lseek(fd, 0, SEEK_END));
    char *room = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    MUST(room != MAP_FAILED);
    SAY(pread(fd, room, len, 0));
    SAY(room[(off_t)1 << 30]);
    SAY(ftruncate(fd, 0));
    SAY(close(fd));
}

static void forks(void) {
    int fd = make("forks"), order[2], answer[2];
    char byte;
    MUST(pipe(order) == 0 && pipe(answer) == 0);
    put(fd, "parent 1\n");
    pid_t pid = fork();
    if (pid == 0) {
        for (int i = 0; i < 3; i++) {
            MUST(read(order[0], &byte, 1) == 1);
            put(fd, "child\n");
            MUST(write(answer[1], "x", 1) == 1);
        }
        int own = make("forks.child");
        for (int i = 0; i < 1000; i++) put(own, "the child's own file\n");
        close(own);
        _exit(7);
    }
    for (int i = 0; i < 3; i++) {
        put(fd, "parent 2\n");
        MUST(write(order[1], "x", 1) == 1);
        MUST(read(answer[0], &byte, 1) == 1);
    }
    wait_for(pid);
    put(fd, "parent 3\n");
    int after = make("forks.after");
    for (int i = 0; i < 1000; i++) put(after, "opened after the fork\n");
    SAY(lseek(fd, 0, SEEK_CUR));
    SAY(close(fd));
}

/* Parent and child write through one descriptor, whoever is first. */
static void forks_at_once(void) {
    enum { RECORDS = 2000, BYTES = 32 };
    char record[BYTES + 1];
    int fd = make_rw("at-once"), next[3] = {0, 0, 0}, bad = 0, who, number;
    for (int i = 0; i < RECORDS; i++) {
        snprintf(record, sizeof record, "writer 0 record %014d \n", i);
        put(fd, record);
    }
    fflush(stdout);
    pid_t pid = fork();
    int me = pid == 0 ? 2 : 1;
    for (int i = 0; i < RECORDS; i++) {
        snprintf(record, sizeof record, "writer %d record %014d \n", me, i);
        put(fd, record);
    }
    if (pid == 0) _exit(0);
    wait_for(pid);
    SAY(lseek(fd, 0, SEEK_CUR));
    lseek(fd, 0, SEEK_SET);
    FILE *file = fdopen(fd, "r");
    while (fgets(record, sizeof record, file)) {
        if (sscanf(record, "writer %d record %d", &who, &number) == 2 && who >= 0 && who < 3 && number == next[who])
            next[who]++;
        else
            bad++;
    }
    printf("bad %d, %d %d %d\n", bad, next[0], next[1], next[2]);
    fclose(file);
    MUST(unlink(at("at-once")) == 0);
}

static void appends(void) {
    pid_t pids[2];
    for (int id = 0; id < 2; id++) {
        pids[id] = fork();
        if (pids[id] == 0) {
            int fd = open(at("appends"), O_CREAT | O_APPEND | O_WRONLY, 0644);
            MUST(fd >= 0);
            for (int i = 0; i < 500; i++) put(fd, id ? "one line, always whole\n" : "one LINE, always whole\n");
            _exit(0);
        }
    }
    wait_for(pids[0]);
    wait_for(pids[1]);
    char text[64];
    FILE *file = fopen(at("appends"), "r");
    int counts[2] = {0, 0};
    while (fgets(text, sizeof text, file)) counts[strcmp(text, "one line, always whole\n") == 0]++;
    printf("%d %d\n", counts[0], counts[1]);
    fclose(file);
    MUST(unlink(at("appends")) == 0);
    /* One writes by direct access, then another opens for appending. */
    int fd = make("appended");
    for (int i = 0; i < 1000; i++) put(fd, "writer\n");
    int other = open(at("appended"), O_APPEND | O_WRONLY);
    put(other, "appender\n");
    put(fd, "writer again, over the other\n");
    put(other, "appender\n");
    SAY(lseek(fd, 0, SEEK_CUR));
    SAY(lseek(other, 0, SEEK_CUR));
}

/* Records of three processes, each written by one call of its own kind: none is cut by another. */
enum { RECORD = 300000, RECORDS = 12 };

static void append_records(int id) {
    int fd = open(at("whole"), O_CREAT | O_WRONLY | (id == 2 ? 0 : O_APPEND), 0644);
    MUST(fd >= 0);
    for (int i = 0; i < RECORDS; i++) {
        memset(big, 'a' + id, RECORD);
        big[RECORD - 1] = '\n';
        struct iovec parts[3] = {{big, 10}, {big + 10, 20}, {big + 30, RECORD - 30}};
        if (id == 0)
            MUST(write(fd, big, RECORD) == RECORD);
        else if (id == 1)
            MUST(writev(fd, parts, 3) == RECORD);
        else
            MUST(pwritev2(fd, parts, 3, i % 2 ? 7 : -1, RWF_APPEND) == RECORD);
        /* Short ones of several parts are one append, too. */
        char text[] = "-------------------\n";
        memset(text, 'A' + id, 19);
        struct iovec line[3] = {{text, 1}, {text + 1, 5}, {text + 6, 14}};
        MUST((id == 2 ? pwritev2(fd, line, 3, -1, RWF_APPEND) : writev(fd, line, 3)) == 20);
    }
    close(fd);
}

static void whole_appends(void) {
    pid_t pids[3];
    for (int id = 0; id < 3; id++) {
        pids[id] = fork();
        if (pids[id] == 0) {
            append_records(id);
            fflush(stdout);
            _exit(0);
        }
    }
    for (int id = 0; id < 3; id++) wait_for(pids[id]);
    FILE *file = fopen(at("whole"), "r");
    int records[3] = {0}, lines[3] = {0}, torn = 0;
    while (fgets((char *)back, sizeof back, file)) {
        size_t len = strlen((char *)back);
        int is_line = back[0] < 'a', id = back[0] - (is_line ? 'A' : 'a');
        if (id < 0 || id > 2 || len != (is_line ? 20 : RECORD)) {
            torn++;
            continue;
        }
        for (size_t i = 0; i < len - 1; i++)
            if (back[i] != back[0]) {
                torn++;
                break;
            }
        (is_line ? lines : records)[id]++;
    }
    fclose(file);
    printf("torn %d, records %d %d %d, lines %d %d %d\n", torn, records[0], records[1], records[2], lines[0], lines[1],
           lines[2]);
    MUST(unlink(at("whole")) == 0);
    /* The offset stands behind what was appended at it, and stays where an offset was named. */
    int fd = make_rw("appended.offset");
    fill(big, sizeof big, 11);
    struct iovec part = {big, 200000}, few[2] = {{big, 3}, {big + 3, 4}};
    MUST(write(fd, big, 1000) == 1000);
    MUST(lseek(fd, 10, SEEK_SET) == 10);
    SAY(pwritev2(fd, &part, 1, 5, RWF_APPEND));
    SAY(lseek(fd, 0, SEEK_CUR));
    SAY(pwritev2(fd, &part, 1, -1, RWF_APPEND));
    SAY(lseek(fd, 0, SEEK_CUR));
    SAY(pwritev2(fd, few, 2, 0, RWF_APPEND | RWF_DSYNC));
    SAY(pwritev2(fd, few, 2, -7, RWF_APPEND));
    SAY(pwritev2(fd, few, 2, -1, 0));
    SAY(lseek(fd, 0, SEEK_CUR));
    SAY(lseek(fd, 0, SEEK_END));
    SAY(close(fd));
}

/* After exec: descriptor `number` continues. */
static void go_on(const char *number) {
    int fd = atoi(number);
    SAY(lseek(fd, 0, SEEK_CUR));
    if (fcntl(fd, F_GETFD) >= 0) put(fd, "after exec\n");
    int mine = make("execs.mine");
    for (int i = 0; i < 100; i++) put(mine, "opened after exec\n");
}

static void execs(void) {
    for (int cloexec = 0; cloexec < 2; cloexec++)
        for (int empty = 0; empty < 2; empty++) {
            char name[32], number[16];
            snprintf(name, sizeof name, "execs.%d.%d", cloexec, empty);
            int fd = open(at(name), O_CREAT | O_WRONLY | (cloexec ? O_CLOEXEC : 0), 0644);
            fd = fcntl(fd, cloexec ? F_DUPFD_CLOEXEC : F_DUPFD, 50);
            snprintf(number, sizeof number, "%d", fd);
            fflush(stdout);
            pid_t pid = fork();
            if (pid == 0) {
                int own = open(at(name), O_WRONLY | (cloexec ? O_CLOEXEC : 0));
                MUST(dup2(own, fd) == fd);
                char *none[] = {NULL};
                put(fd, "before exec\n");
                if (cloexec) fcntl(fd, F_SETFD, FD_CLOEXEC);
                execl("/nonexistent", "x", NULL);
                put(fd, "exec failed\n");
                if (empty)
                    execle(self, self, dir, "go-on", number, NULL, none);
                else
                    execl(self, self, dir, "go-on", number, NULL);
                _exit(9);
            }
            wait_for(pid);
            close(fd);
        }
}

static void exec_of_one_that_wrote(void) {
    int fd = make("exec");
    char number[16];
    for (int i = 0; i < 10000; i++) put(fd, "directly written\n");
    snprintf(number, sizeof number, "%d", fd);
    fflush(stdout);
    execlp(self, self, dir, "go-on", number, NULL);
}

static void vforks(void) {
    int fd = make("vforks");
    put(fd, "parent\n");
    fflush(stdout);
    pid_t pid = vfork();
    if (pid == 0) {
        dup2(fd, 1);
        close(fd);
        execl("/bin/echo", "echo", "child", NULL);
        _exit(9);
    }
    wait_for(pid);
    put(fd, "parent again\n");
    printf("still here\n");
    int other = make("vforks.other");
    for (int i = 0; i < 1000; i++) put(other, "not touched by a child\n");
    pid = vfork();
    if (pid == 0) {
        close(other);
        close(fd);
        _exit(3);
    }
    wait_for(pid);
    put(other, "end\n");
    SAY(lseek(other, 0, SEEK_CUR));
    SAY(close(other));
    SAY(close(fd));
}

static void spawns(void) {
    int fd = make("spawns");
    put(fd, "parent\n");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fd, 1);
    char *args[] = {"echo", "spawned", NULL};
    pid_t pid;
    MUST(posix_spawnp(&pid, "echo", &actions, NULL, args, environ) == 0);
    wait_for(pid);
    put(fd, "parent\n");
    int inherited = dup2(make("spawns.system"), 9);
    put(inherited, "before\n");
    SAY(system("echo system >&9"));
    put(inherited, "after\n");
    FILE *child = popen("cat >&9", "w");
    fputs("popen\n", child);
    SAY(pclose(child));
    put(inherited, "after\n");
    SAY(close(fd));
}

static void dups(void) {
    int fd = make("dups");
    put(fd, "one ");
    int two = dup(fd);
    put(two, "two ");
    put(fd, "three ");
    int four = fcntl(fd, F_DUPFD, 100);
    put(four, "four ");
    MUST(dup2(fd, 200) == 200);
    put(200, "five ");
    MUST(dup3(fd, 201, O_CLOEXEC) == 201);
    put(201, "six ");
    SAY(close(fd));
    put(200, "seven ");
    SAY(lseek(two, 0, SEEK_CUR));
    int other = make("dups.other");
    put(other, "lost number");
    int target = make("dups.target");
    put(target, "before");
    MUST(dup2(other, target) == target);
    put(target, " found");
    SAY(dup2(12345, other));
    put(other, " still there");
    SAY(dup2(other, other) == other);
    put(other, " and again");
    int appending = make("dups.append");
    put(appending, "text");
    MUST(fcntl(appending, F_SETFL, O_APPEND) == 0);
    SAY(lseek(appending, 0, SEEK_SET));
    put(appending, " appended");
    SAY(lseek(appending, 0, SEEK_CUR));
    /* Numbers that the library may use itself. */
    int high = make("dups.high");
    put(high, "0");
    for (int number = 895; number < 910; number++) {
        MUST(dup2(high, number) == number);
        put(number, "x");
    }
    int next = make("dups.next");
    for (int i = 0; i < 1000; i++) put(next, "goes on");
}

static void closes(void) {
    int fds[8];
    char name[16];
    for (int i = 0; i < 8; i++) {
        snprintf(name, sizeof name, "closes.%d", i);
        fds[i] = make(name);
        put(fds[i], name);
    }
    SAY(close_range(fds[0], fds[7], CLOSE_RANGE_CLOEXEC));
    put(fds[3], " still open");
    SAY(close_range(fds[2], fds[3], 0));
    SAY(write(fds[2], "x", 1));
    put(fds[4], " four");
    SAY(close(fds[5]));
    SAY(close(fds[5]));
    int again = make("closes.again");
    MUST(again == fds[2]);
    put(again, "reused");
    closefrom(fds[6]);
    SAY(write(fds[6], "x", 1));
    put(fds[0], " zero");
    for (int fd = 3; fd < 2000; fd++) close(fd);
    SAY(write(fds[0], "x", 1));
    int fresh = make("closes.fresh");
    for (int i = 0; i < 100000; i++) put(fresh, "all were closed\n");
    SAY(close(fresh));
    closefrom(3);
    fresh = make("closes.fresh2");
    for (int i = 0; i < 1000; i++) put(fresh, "all were closed\n");
}

static void raw_closes(void) {
    int fd = make("raw.first"), ends[2];
    for (int i = 0; i < 1000; i++) put(fd, "first\n");
    syscall(SYS_close, fd);
    MUST(pipe(ends) == 0);
    MUST(ends[0] == fd);
    SAY(write(ends[0], "not a file", 10));
    put(ends[1], "through a pipe");
    char text[32] = {0};
    SAY(read(ends[0], text, sizeof text));
    printf("%s\n", text);
    int second = make("raw.second");
    for (int i = 0; i < 1000; i++) put(second, "second\n");
    syscall(SYS_close, second);
    int third = (int)syscall(SYS_openat, AT_FDCWD, at("raw.third"), O_CREAT | O_WRONLY, 0644);
    MUST(third == second);
    put(third, "third\n");
    SAY(lseek(third, 0, SEEK_CUR));
    put(third, "third\n");
    FILE *file = fopen(at("raw.stdio"), "w");
    fputs("stdio\n", file);
    fclose(file);
    SAY(close(third));
}

static void rights(void) {
    int pair[2], fd = make("rights");
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    pid_t pid = fork();
    char byte = 'x', control[CMSG_SPACE(sizeof(int))];
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    if (pid == 0) {
        MUST(recvmsg(pair[1], &message, 0) == 1);
        int got = *(int *)CMSG_DATA(CMSG_FIRSTHDR(&message));
        put(got, "receiver\n");
        _exit(0);
    }
    close(fd);
    fd = make("rights");
    for (int i = 0; i < 1000; i++) put(fd, "sender\n");
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    *head = (struct cmsghdr){CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
    *(int *)CMSG_DATA(head) = fd;
    MUST(sendmsg(pair[0], &message, 0) == 1);
    wait_for(pid);
    put(fd, "sender again\n");
    SAY(lseek(fd, 0, SEEK_CUR));
}

static void relative(void) {
    MUST(chdir(dir) == 0);
    int fd = openat(AT_FDCWD, "relative", O_CREAT | O_WRONLY, 0644);
    put(fd, "relative");
    int base = open(".", O_PATH | O_DIRECTORY), other = openat(base, "relative2", O_CREAT | O_RDWR, 0600);
    put(other, "to a directory");
    SAY(read(base, path, 1));
    char template[] = "temporary.XXXXXX";
    int temporary = mkstemp(template);
    put(temporary, "temporary");
    SAY(pread(temporary, path, 100, 0));
    MUST(rename(template, "temporary") == 0);
    put(temporary, " renamed");
    int created = creat("created", 0640);
    put(created, "created");
    int nameless = open(".", O_TMPFILE | O_WRONLY, 0600);
    if (nameless >= 0) put(nameless, "nameless");
    MUST(unlink("relative2") == 0);
    put(other, "without a name");
    SAY(lseek(other, 0, SEEK_CUR));
    SAY(open("", O_WRONLY));
    SAY(open("missing/file", O_CREAT | O_WRONLY, 0600));
}

static volatile sig_atomic_t signals, signal_fd;

static void on_signal(int number) {
    (void)number;
    int before = errno;
    char text[33];
    snprintf(text, sizeof text, "handler %22d\n", (int)++signals);
    if (write(signal_fd, text, 31) != 31) abort();
    errno = before;
}

static void handlers(void) {
    int fd = make_rw("handlers");
    signal_fd = fd;
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval timer = {{0, 300}, {0, 300}};
    setitimer(ITIMER_REAL, &timer, NULL);
    char text[32];
    int count = 0;
    while (signals < 1500) {
        snprintf(text, sizeof text, "program %22d\n", ++count);
        errno = 77;
        MUST(write(fd, text, 31) == 31);
        MUST(errno == 77);
    }
    timer.it_value.tv_usec = timer.it_interval.tv_usec = 0;
    setitimer(ITIMER_REAL, &timer, NULL);
    off_t size = lseek(fd, 0, SEEK_END);
    printf("%s\n", size == (off_t)(count + signals) * 31 ? "all there" : "bytes are missing");
    lseek(fd, 0, SEEK_SET);
    int seen[2] = {0, 0};
    FILE *file = fdopen(fd, "r");
    while (fgets(text, sizeof text, file)) {
        int handler = strncmp(text, "handler", 7) == 0;
        if (atoi(text + 8) != ++seen[handler]) break;
    }
    printf("%s\n", seen[0] == count && seen[1] == signals ? "in order" : "out of order");
    fclose(file);
    MUST(unlink(at("handlers")) == 0);
}

static int thread_fd;

static void *thread(void *arg) {
    char text[65];
    for (int i = 0; i < 20000; i++) {
        snprintf(text, sizeof text, "thread %ld record %-47d\n", (long)arg, i);
        if (write(thread_fd, text, strlen(text)) != (ssize_t)strlen(text)) abort();
        if (i % 5000 == 0) lseek(thread_fd, 0, SEEK_CUR);
    }
    return NULL;
}

static void threads(void) {
    pthread_t ids[4];
    thread_fd = make_rw("threads");
    for (long i = 0; i < 4; i++) pthread_create(&ids[i], NULL, thread, (void *)i);
    /* Others come and go meanwhile. */
    for (int i = 0; i < 20; i++) {
        pid_t pid = fork();
        if (pid == 0) _exit(0);
        waitpid(pid, NULL, 0);
        int fd = make("threads.more");
        put(fd, "more");
        close(fd);
    }
    for (int i = 0; i < 4; i++) pthread_join(ids[i], NULL);
    SAY(lseek(thread_fd, 0, SEEK_END));
    lseek(thread_fd, 0, SEEK_SET);
    int next[4] = {0, 0, 0, 0}, id, record, bad = 0;
    char text[80];
    FILE *file = fdopen(thread_fd, "r");
    while (fgets(text, sizeof text, file))
        if (sscanf(text, "thread %d record %d", &id, &record) != 2 || record != next[id & 3]++) bad++;
    printf("bad %d, %d %d %d %d\n", bad, next[0], next[1], next[2], next[3]);
    fclose(file);
    MUST(unlink(at("threads")) == 0);
}

static void bad_pointers(void) {
    int fd = make_rw("bad");
    char *guard = mmap(NULL, 4 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    put(fd, "text");
    SAY(write(fd, guard, 1 << 20));
    SAY(pwrite(fd, guard, 1 << 20, 0));
    MUST(mprotect(guard, 1 << 20, PROT_READ | PROT_WRITE) == 0);
    struct iovec parts[2] = {{guard, 100}, {guard + (2 << 20), 1 << 20}};
    ssize_t some = writev(fd, parts, 2);
    SAY(some == 100 || (some < 0 && errno == EFAULT));
    SAY(ftruncate(fd, 4));
    SAY(lseek(fd, 0, SEEK_END));
    SAY(write(fd, big, (size_t)-1));
    SAY(write(fd, (void *)-4096, 1 << 20));
    fill(big, sizeof big, 3);
    MUST(write(fd, big, sizeof big) == sizeof big);
    SAY(pread(fd, guard + (2 << 20), 1 << 20, 0));
    lseek(fd, 0, SEEK_SET);
    SAY(read(fd, guard + (2 << 20), 1 << 20));
    int reader = open(at("bad"), O_RDONLY);
    SAY(read(reader, guard + (2 << 20), 1 << 20));
    SAY(read(reader, back, 100));
    SAY(write(reader, "x", 1));
    SAY(close(reader));
    SAY(close(fd));
    reader = open(at("bad"), O_RDONLY);
    SAY(pread(reader, guard + (2 << 20), 1 << 20, 0));
    // What lies behind the end of the file stays as it was.
    memset(back, 'b', sizeof back);
    SAY(pread(reader, back, sizeof back, lseek(reader, 0, SEEK_END) - 100));
    SAY(back[100] == 'b' && back[sizeof back - 8] == 'b' && back[sizeof back - 1] == 'b');
    SAY(close(reader));
}

/* Buffers of all lengths that are bad at their begin, at their end, or were good before. */
static void bad_buffers(void) {
    int fd = make_rw("bad-buffers");
    long page = sysconf(_SC_PAGESIZE);
    char *memory = mmap(NULL, 16 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(memory, 'm', 16 * page);
    char *bad = memory + 8 * page;
    MUST(mprotect(bad, page, PROT_NONE) == 0);
    put(fd, "text");
    SAY(write(fd, bad, 1));
    SAY(write(fd, bad, page));
    SAY(write(fd, NULL, 10));
    SAY(write(fd, NULL, 0));
    SAY(pwrite(fd, bad, 100, 2));
    SAY(lseek(fd, 0, SEEK_CUR));
    struct iovec only[1] = {{bad, 10}}, first[2] = {{bad, 10}, {memory, 10}};
    SAY(writev(fd, only, 1));
    SAY(pwritev(fd, only, 1, 0));
    SAY(writev(fd, first, 2));
    SAY(writev(fd, (struct iovec *)bad, 2));
    SAY(pwritev(fd, (struct iovec *)bad, 2, 0));
    SAY(readv(fd, (struct iovec *)bad, 2));
    SAY(lseek(fd, 0, SEEK_CUR));
    /* The kernel takes what comes before the bad page, or nothing: so does what stands before it. */
    struct iovec second[2] = {{memory, 10}, {bad, 10}};
    ssize_t some = pwritev(fd, second, 2, 100);
    SAY(some == 10 || (some < 0 && errno == EFAULT));
    some = pwrite(fd, bad - 100, 200, 200);
    SAY(some == 100 || (some < 0 && errno == EFAULT));
    SAY(ftruncate(fd, 4));
    /* Good at first, and known to be so. */
    SAY(write(fd, memory, page));
    SAY(write(fd, memory + page, 100));
    MUST(mprotect(memory, page, PROT_NONE) == 0);
    MUST(munmap(memory + page, page) == 0);
    SAY(write(fd, memory, page));
    SAY(write(fd, memory + page, 100));
    MUST(mprotect(memory, page, PROT_READ | PROT_WRITE) == 0);
    SAY(write(fd, memory, page));
    /* Read back from a file that is long enough to be read by direct access. */
    fill(big, sizeof big, 5);
    MUST(write(fd, big, sizeof big) == sizeof big);
    SAY(close(fd));
    int reader = open(at("bad-buffers"), O_RDONLY);
    MUST(mprotect(memory + 2 * page, page, PROT_READ) == 0);
    for (int i = 0; i < 3; i++) {
        SAY(read(reader, back, 8192));
        SAY(read(reader, bad, 10));
        SAY(read(reader, NULL, 8192));
        SAY(pread(reader, bad, page, 0));
        SAY(read(reader, memory + 2 * page, 100));
        SAY(lseek(reader, 0, SEEK_CUR));
    }
    SAY(readv(reader, only, 1));
    SAY(preadv(reader, (struct iovec *)bad, 2, 0));
    SAY(close(reader));
    MUST(munmap(memory, 16 * page) == 0);
}

/* Who does not ask for the size gets the right one or none. */
static void statx_of_nothing(void) {
    int fd = make_rw("statx");
    struct statx st;
    fill(big, sizeof big, 6);
    for (int i = 1; i <= 4; i++) {
        MUST(write(fd, big, 100000) == 100000);
        MUST(statx(fd, "", AT_EMPTY_PATH, 0, &st) == 0);
        SAY((st.stx_mask & STATX_SIZE) == 0 || st.stx_size == i * 100000ul);
        MUST(statx(AT_FDCWD, at("statx"), 0, STATX_MODE, &st) == 0);
        SAY((st.stx_mask & STATX_SIZE) == 0 || st.stx_size == i * 100000ul);
    }
    SAY(close(fd));
}

static void both_ways(void) {
    int fd = make_rw("both");
    fill(big, sizeof big, 4);
    for (int i = 0; i < 40; i++) {
        off_t offset = (off_t)(i * 7919 % 900) * 1000;
        size_t len = (size_t)(i * 3571 % 60000) + 1;
        MUST(pwrite(fd, big + offset, len, offset) == (ssize_t)len);
        MUST(pread(fd, back, len, offset) == (ssize_t)len);
        MUST(memcmp(big + offset, back, len) == 0);
        MUST(lseek(fd, offset, SEEK_SET) == offset);
        MUST(write(fd, big + offset, len) == (ssize_t)len);
        MUST(lseek(fd, -(off_t)len, SEEK_CUR) == offset);
        MUST(read(fd, back, len) == (ssize_t)len);
        MUST(memcmp(big + offset, back, len) == 0);
    }
    SAY(ftruncate(fd, 500000));
    SAY(lseek(fd, 0, SEEK_END));
    put(fd, "after the truncation");
    SAY(ftruncate(fd, 2000000));
    SAY(posix_fallocate(fd, 0, 100));
    put(fd, " and again");
    SAY(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096, 8192));
    put(fd, ".");
    SAY(lseek(fd, 0, SEEK_CUR));
    char *map = mmap(NULL, 100000, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map != MAP_FAILED) {
        memcpy(map + 1000, "mapped", 6);
        MUST(pwrite(fd, "written", 7, 2000) == 7);
        MUST(msync(map, 100000, MS_SYNC) == 0);
        SAY(memcmp(map + 2000, "written", 7));
        MUST(munmap(map, 100000) == 0);
    }
    SAY(close(fd));
}

static void stdio(void) {
    FILE *file = fopen(at("stdio"), "w+");
    for (int i = 0; i < 3000; i++) fprintf(file, "line %d\n", i);
    fseek(file, 100, SEEK_SET);
    fputs("SEEK", file);
    fflush(file);
    put(fileno(file), "[raw]");
    fseek(file, 0, SEEK_END);
    printf("%ld\n", ftell(file));
    SAY(fclose(file));
    int fd = make("stdio.fd");
    put(fd, "before fdopen\n");
    file = fdopen(fd, "w");
    for (int i = 0; i < 3000; i++) fprintf(file, "line %d\n", i);
    fflush(file);
    put(fd, "raw\n");
    fprintf(file, "end\n");
    SAY(fclose(file));
    fflush(stdout);
    int saved = dup(1);
    MUST(freopen(at("stdio.out"), "w", stdout) != NULL);
    for (int i = 0; i < 3000; i++) printf("printed %d\n", i);
    fflush(stdout);
    dup2(saved, 1);
    file = fopen(at("stdio.append"), "a");
    fputs("a", file);
    SAY(fclose(file));
    file = tmpfile();
    fputs("temporary", file);
    fclose(file);
}

static void transfers(void) {
    int from = make_rw("transfer.from"), to = make_rw("transfer.to"), ends[2];
    fill(big, 300000, 5);
    MUST(write(from, big, 300000) == 300000);
    put(to, "head");
    MUST(lseek(from, 1000, SEEK_SET) == 1000);
    SAY(sendfile(to, from, NULL, 50000));
    SAY(lseek(from, 0, SEEK_CUR));
    put(to, "middle");
    off_t offset = 70000;
    SAY(sendfile(to, from, &offset, 1000));
    SAY((long)offset);
    SAY(copy_file_range(from, NULL, to, NULL, 20000, 0));
    put(to, "after");
    offset = 5;
    SAY(copy_file_range(from, &offset, to, NULL, 100, 0));
    MUST(pipe(ends) == 0);
    SAY(splice(from, NULL, ends[1], NULL, 4000, 0));
    SAY(splice(ends[0], NULL, to, NULL, 4000, 0));
    put(to, "end");
    put(from, "end");
    SAY(lseek(from, 0, SEEK_CUR));
    SAY(lseek(to, 0, SEEK_CUR));
}

static void asynchronous(void) {
    int fd = make_rw("aio");
    put(fd, "synchronous");
    fill(big, sizeof big, 6);
    struct aiocb one = {.aio_fildes = fd, .aio_buf = big, .aio_nbytes = 100000, .aio_offset = 5000};
    struct aiocb two = {.aio_fildes = fd, .aio_buf = big, .aio_nbytes = 1000, .aio_offset = 200000,
                        .aio_lio_opcode = LIO_WRITE};
    struct aiocb *list[] = {&two};
    MUST(aio_write(&one) == 0);
    while (aio_error(&one) == EINPROGRESS) usleep(100);
    SAY(aio_return(&one));
    put(fd, " goes on");
    SAY(lio_listio(LIO_WAIT, list, 1, NULL));
    SAY(aio_return(&two));
    put(fd, ".");
    SAY(lseek(fd, 0, SEEK_CUR));
}

static void fortified(void) {
    volatile int flags = O_CREAT | O_RDWR;
    volatile size_t len = 4000;
    char text[4096];
    int fd = open(at("fortified"), flags, 0644);
    fill(big, sizeof big, 7);
    MUST(write(fd, big, 100000) == 100000);
    flags = O_RDONLY;
    int reader = open(at("fortified"), flags);
    SAY(read(reader, text, len));
    SAY(memcmp(text, big, 4000));
    SAY(pread(reader, text, len, 5000));
    SAY(memcmp(text, big + 5000, 4000));
    len = 5000;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        signal(SIGABRT, SIG_DFL);
        close(2);
        _exit((int)read(reader, text, len));
    }
    wait_for(pid);
}

static void count_signal(int number) {
    (void)number;
    signals++;
}

static void limits(void) {
    struct rlimit limit = {100000, RLIM_INFINITY};
    int fd = make("limits");
    put(fd, "before");
    signal(SIGXFSZ, SIG_IGN);
    MUST(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    fill(big, 200000, 8);
    int other = make("limits.other");
    SAY(write(other, big, 200000));
    SAY(write(other, big, 10));
    SAY(pwrite(other, "x", 1, 200000));
    signal(SIGXFSZ, count_signal);
    SAY(ftruncate(other, 100001));
    SAY(ftruncate(other, 50000));
    SAY(truncate(at("limits.other"), 100001));
    SAY(truncate(at("limits.other"), 60000));
    SAY(fallocate(other, 0, 0, 100001));
    SAY(fallocate(other, 0, 0, 90000));
    SAY(posix_fallocate(other, 50000, 50001));
    SAY(lseek(other, 0, SEEK_END));
    int appender = open(at("limits.other"), O_WRONLY | O_APPEND);
    SAY(write(appender, big, 20000));
    SAY(write(appender, big, 20000));
    struct iovec parts[2] = {{big, 1}, {big, 1}};
    SAY(writev(appender, parts, 2));
    SAY(pwritev2(other, parts, 2, 0, RWF_APPEND));
    MUST(setrlimit(RLIMIT_FSIZE, &(struct rlimit){50000, RLIM_INFINITY}) == 0);
    SAY(ftruncate(other, 80000));
    SAY(ftruncate(other, 80001));
    SAY(fallocate(other, FALLOC_FL_KEEP_SIZE, 0, 70000));
    SAY(signals);
}

/* Reads what another process wrote, while and after it writes. */
static void readers(void) {
    int order[2], answer[2];
    char byte;
    MUST(pipe(order) == 0 && pipe(answer) == 0);
    fill(big, sizeof big, 9);
    pid_t pid = fork();
    if (pid == 0) {
        int fd = make("readers");
        MUST(write(fd, big, 1000000) == 1000000);
        MUST(write(answer[1], "x", 1) == 1);
        MUST(read(order[0], &byte, 1) == 1);
        MUST(write(fd, big + 1000000, 1000000) == 1000000);
        MUST(pwrite(fd, "changed", 7, 10) == 7);
        MUST(lseek(fd, 2500000, SEEK_SET) == 2500000);
        MUST(write(fd, big + 2500000, 100) == 100);
        _exit(0);
    }
    MUST(read(answer[0], &byte, 1) == 1);
    int fd = open(at("readers"), O_RDONLY);
    SAY(read(fd, back, sizeof back));
    SAY(memcmp(big, back, 1000000));
    SAY(read(fd, back, sizeof back));
    MUST(write(order[1], "x", 1) == 1);
    wait_for(pid);
    SAY(read(fd, back + 1000000, 1000000));
    SAY(memcmp(big, back, 2000000));
    SAY(lseek(fd, 0, SEEK_SET));
    memcpy(big + 10, "changed", 7);
    memset(big + 2000000, 0, 500000);
    size_t done = 0, len = 1;
    ssize_t got;
    while ((got = read(fd, back + done, len)) > 0) {
        done += (size_t)got;
        len = len > 300000 ? 5 : len * 4;
    }
    SAY((long)done);
    SAY(memcmp(big, back, done));
    struct iovec parts[3] = {{back, 10000}, {back + 10000, 0}, {back + 10000, 700000}};
    SAY(preadv(fd, parts, 3, 1900000));
    SAY(memcmp(big + 1900000, back, 700100));
    SAY(lseek(fd, -50, SEEK_END));
    SAY(readv(fd, parts, 3));
    SAY(read(fd, back, 10));
    SAY(pread(fd, back, 10, 9000000));
    SAY(pread(fd, back, 10, -1));
    /* Changed under the reader. */
    int writer = open(at("readers"), O_WRONLY);
    for (int i = 0; i < 50; i++) {
        MUST(pwrite(writer, &i, sizeof i, i * 40000) == sizeof i);
        int found = -1;
        MUST(pread(fd, &found, sizeof found, i * 40000) == sizeof found);
        MUST(found == i);
        MUST(pread(fd, back, 8192, i * 40000) == 8192);
        MUST(memcmp(back, &i, sizeof i) == 0);
    }
    MUST(ftruncate(writer, 1234) == 0);
    SAY(pread(fd, back, 8192, 0));
    SAY(pread(fd, back, 8192, 1234));
    close(writer);
    int copy = dup(fd);
    SAY(lseek(fd, 200, SEEK_SET));
    SAY(read(copy, back, 100));
    SAY(lseek(fd, 0, SEEK_CUR));
}

/* A file that nobody writes now, then somebody does. */
static void lists(void) {
    size_t size = 2000000;
    fill(big, sizeof big, 11);
    memset(big + 700000, 0, 200000);
    int fd = make("lists");
    MUST(write(fd, big, 700000) == 700000);
    MUST(pwrite(fd, big + 900000, size - 900000, 900000) == (ssize_t)(size - 900000));
    SAY(close(fd));
    fd = open(at("lists"), O_RDONLY);
    for (int i = 0; i < 30; i++) {
        size_t offset = (size_t)i * 60001;
        MUST(pread(fd, back, 50000, (off_t)offset) == 50000);
        MUST(memcmp(back, big + offset, 50000) == 0);
    }
    SAY(lseek(fd, 650000, SEEK_SET));
    SAY(read(fd, back, 400000));
    SAY(memcmp(back, big + 650000, 400000));
    SAY(lseek(fd, 0, SEEK_CUR));
    SAY(read(fd, back, sizeof back));
    SAY(read(fd, back, sizeof back));
    for (int i = 0; i < 20; i++) {
        int writer = open(at("lists"), O_WRONLY);
        MUST(pwrite(writer, &i, sizeof i, i * 90000) == sizeof i);
        memcpy(big + i * 90000, &i, sizeof i);
        MUST(pread(fd, back, size, 0) == (ssize_t)size);
        MUST(memcmp(back, big, size) == 0);
        MUST(close(writer) == 0);
        MUST(pread(fd, back, size, 0) == (ssize_t)size);
        MUST(memcmp(back, big, size) == 0);
    }
    int other = open(at("lists"), O_RDONLY);
    SAY(read(other, back, 100000));
    MUST(truncate(at("lists"), 150000) == 0);
    SAY(read(other, back, 100000));
    SAY(read(other, back, 100000));
    int writer = open(at("lists"), O_WRONLY | O_TRUNC);
    SAY(lseek(other, 0, SEEK_SET));
    SAY(read(other, back, 100000));
    put(writer, "short");
    SAY(read(other, back, 100000));
    SAY(close(writer));
    SAY(close(other));
    SAY(close(fd));
}

static void huge_offsets(void) {
    int fd = make_rw("huge");
    fill(big, sizeof big, 10);
    off_t far = (off_t)5 << 30;
    MUST(pwrite(fd, big, 100000, far) == 100000);
    MUST(lseek(fd, far + 100000, SEEK_SET) == far + 100000);
    MUST(write(fd, big, 5000) == 5000);
    printf("%lld\n", (long long)lseek(fd, 0, SEEK_END));
    MUST(pread(fd, back, 100000, far) == 100000);
    SAY(memcmp(big, back, 100000));
    MUST(ftruncate(fd, 1000) == 0);
}

/* Where each lock of others on a file begins and how long it is, asked by a process that has none. */
static void print_locks(const char *name) {
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        int fd = open(at(name), O_RDWR);
        MUST(fd >= 0);
        for (off_t from = 0;;) {
            struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = from};
            MUST(fcntl(fd, F_GETLK, &lock) == 0);
            if (lock.l_type == F_UNLCK) break;
            printf("locked: %lld, %lld bytes\n", (long long)lock.l_start, (long long)lock.l_len);
            from = lock.l_start + lock.l_len;
        }
        MUST(lseek(fd, 99900, SEEK_SET) == 99900);
        SAY(lockf(fd, F_TEST, 1));
        SAY(lockf(fd, F_TLOCK, 1));
        SAY(lockf(fd, F_TLOCK, -10));
        fflush(stdout);
        _exit(0);
    }
    wait_for(pid);
}

static void lock_from(int fd, int command, int whence, off_t start, off_t len) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = whence, .l_start = start, .l_len = len};
    say("lock", fcntl(fd, command, &lock));
    printf("%d %d %lld %lld\n", lock.l_type, lock.l_whence, (long long)lock.l_start, (long long)lock.l_len);
}

/* Ranges relative to the offset and to the end, after writes that the kernel has not seen. */
static void relative_locks(void) {
    int fd = make_rw("locked");
    fill(big, 200000, 12);
    for (int i = 0; i < 4; i++) MUST(write(fd, big + i * 50000, 50000) == 50000);
    MUST(lseek(fd, 100000, SEEK_SET) == 100000);
    put(fd, "0123456789");
    lock_from(fd, F_SETLK, SEEK_CUR, -110, 50);
    lock_from(fd, F_SETLKW, SEEK_END, -1000, 100);
    lock_from(fd, F_GETLK, SEEK_CUR, 0, 5);
    lock_from(fd, F_SETLK, SEEK_CUR, -200000, 5);
    lock_from(fd, F_SETLK, SEEK_CUR, LLONG_MAX, 5);
    SAY(lockf(fd, F_LOCK, 30));
    SAY(lockf(fd, F_TEST, 30));
    SAY(lockf(fd, 77, 30));
    MUST(lseek(fd, 0, SEEK_CUR) == 100010);
    print_locks("locked");
    for (int i = 0; i < 4; i++) MUST(write(fd, big + i * 50000, 50000) == 50000);
    SAY(lockf(fd, F_LOCK, -20));
    MUST(lseek(fd, 100020, SEEK_SET) == 100020);
    SAY(lockf(fd, F_ULOCK, 10));
    print_locks("locked");
}

/* A lock lives as long as no descriptor of the program that leads to its file is closed. */
static void kept_locks(void) {
    int fd = make_rw("kept");
    put(fd, "0123456789");
    lock_from(fd, F_SETLK, SEEK_SET, 5, 19);
    SAY(truncate(at("kept"), 7));
    print_locks("kept");
    char first[sizeof path];
    strcpy(first, at("kept"));
    MUST(link(first, at("kept-too")) == 0);
    FILE *stream = fopen(at("kept-too"), "r+");
    MUST(stream != NULL);
    print_locks("kept");
    SAY(fputs("abc", stream));
    SAY(fflush(stream));
    print_locks("kept");
    MUST(fclose(stream) == 0);
    print_locks("kept");
    MUST(chmod(at("kept"), 0400) == 0);
    MUST(seteuid(65534) == 0);
    SAY(truncate(at("kept"), 3));
    SAY(fopen(at("kept"), "w") == NULL);
    MUST(seteuid(0) == 0);
    SAY(truncate(at("kept"), -1));
    SAY(fopen(at("kept"), "wx") == NULL);
    SAY(fopen(at("kept"), "q") == NULL);
    stream = fopen(at("kept"), "we");
    MUST(stream != NULL);
    SAY(fcntl(fileno(stream), F_GETFD));
    SAY(fputs("de", stream));
    MUST(fclose(stream) == 0);
}

static int print_list(int fd, const char *format, ...) {
    va_list list;
    va_start(list, format);
    int result = vdprintf(fd, format, list);
    va_end(list);
    return result;
}

static int count_unread(int fd) {
    int count = -77;
    MUST(ioctl(fd, FIONREAD, &count) == 0);
    return count;
}

/* All else that goes by the offset, or moves it, after writes that the kernel has not seen. */
static void positions(void) {
    int fd = make_rw("positions");
    fill(big, sizeof big, 13);
    for (int i = 0; i < 4; i++) MUST(write(fd, big, 50000) == 50000);
    SAY(dprintf(fd, "%d %s %f %c %ld %Lf|%d %d %d %d", 1, "text", 2.5, 'c', -7L, 3.25L, 5, 6, 7, 8));
    put(fd, "[put]");
    SAY(dprintf(fd, "%.1f %.1f %.1f %.1f %.1f %.1f %.1f %.1f %.1f %.1f", .1, .2, .3, .4, .5, .6, .7, .8, .9, 1.));
    SAY(print_list(fd, "%s %d %f", "list", 4, 4.5));
    MUST(write(fd, big, 100000) == 100000);
    SAY(dprintf(fd, "%*d%s", 200000, 1, "wide"));
    SAY(lseek(fd, 0, SEEK_CUR));
    void *frames[4] = {(void *)1, (void *)2, (void *)3, (void *)4};
    for (int i = 0; i < 4; i++) MUST(write(fd, big, 50000) == 50000);
    backtrace_symbols_fd(frames, 4, fd);
    put(fd, "after frames");
    SAY(count_unread(fd));
    SAY(lseek(fd, -70000, SEEK_CUR));
    SAY(count_unread(fd));
    struct iovec part = {big, 60000}, in = {back, 1000};
    SAY(pwritev2(fd, &part, 1, -1, RWF_DSYNC));
    SAY(pwritev2(fd, &part, 1, 70, RWF_DSYNC));
    SAY(pwritev2(fd, &part, 1, -1, 0));
    SAY(preadv2(fd, &in, 1, 70, 0));
    SAY(preadv2(fd, &in, 1, -1, 0));
    SAY(preadv2(fd, &in, 1, -2, 0));
    SAY(lseek(fd, 0, SEEK_CUR));
    SAY(memcmp(big, back, 1000));
    /* Another open file of the same file has an offset of its own. */
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    MUST(write(fd, big, 100000) == 100000);
    int other = open(name, O_RDWR);
    SAY(lseek(other, 0, SEEK_CUR));
    put(other, "other");
    MUST(write(fd, big, 100000) == 100000);
    SAY(lseek(other, 0, SEEK_END) == lseek(fd, 0, SEEK_CUR));
    SAY(close(other));
    SAY(lseek(fd, 10, SEEK_DATA) >= 0);
    MUST(write(fd, big, 70000) == 70000);
    SAY(lseek(fd, -20, SEEK_END));
    MUST(write(fd, big, 70000) == 70000);
    SAY(lseek(fd, 0, SEEK_CUR));
    SAY(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED));
    SAY(ftruncate(fd, 3000000));
    MUST(write(fd, big, 70000) == 70000);
    SAY(lseek(fd, 0, SEEK_CUR));
    SAY(close(fd));
    /* A reader. */
    int reader = open(at("positions"), O_RDONLY);
    MUST(read(reader, back, 100000) == 100000);
    SAY(count_unread(reader));
    in.iov_len = 70000;
    SAY(readv(reader, &in, 1));
    SAY(preadv2(reader, &in, 1, -1, 0));
    SAY(lseek(reader, 0, SEEK_CUR));
    MUST(read(reader, back, 100000) == 100000);
    SAY(lseek(reader, 5, SEEK_CUR));
    FILE *file = fdopen(dup(reader), "r");
    SAY(fgetc(file));
    fclose(file);
    SAY(lseek(reader, 0, SEEK_CUR) >= 340005);
    SAY(close(reader));
    /* A standard descriptor that was opened, and its stream. */
    fflush(stdout);
    int saved = dup(1);
    close(1);
    MUST(open(at("positions.out"), O_CREAT | O_WRONLY, 0644) == 1);
    for (int i = 0; i < 4; i++) MUST(write(1, big, 50000) == 50000);
    printf("printed");
    fflush(stdout);
    for (int i = 0; i < 4; i++) MUST(write(1, big, 50000) == 50000);
    printf("again");
    fflush(stdout);
    MUST(dup2(saved, 1) == 1);
}

/* System calls by number, as libuv and others make them. */
static void numbers(void) {
    int fd = make_rw("numbers");
    fill(big, sizeof big, 14);
    for (int i = 0; i < 4; i++) MUST(write(fd, big + i * 50000, 50000) == 50000);
    struct statx first;
    SAY(syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &first));
    SAY((long)first.stx_size);
    SAY(syscall(SYS_write, fd, "number", 6));
    SAY(syscall(SYS_close, fd));
    fd = syscall(SYS_openat, AT_FDCWD, at("numbers"), O_CREAT | O_RDWR, 0644);
    MUST(fd >= 0);
    SAY(lseek(fd, 0, SEEK_END));
    for (int i = 0; i < 4; i++) MUST(syscall(SYS_write, fd, big + i * 50000, 50000) == 50000);
    struct iovec parts[2] = {{big, 10}, {big + 10, 70000}}, in = {back, 80000};
    SAY(syscall(SYS_writev, fd, parts, 2));
    SAY(syscall(SYS_pwrite64, fd, "pwrite", 6, 100));
    SAY(syscall(SYS_pwritev2, fd, parts, 2, 5L, 0L, RWF_APPEND));
    SAY(syscall(SYS_lseek, fd, 0L, SEEK_CUR));
    struct statx stx;
    SAY(syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &stx));
    SAY((long)stx.stx_size);
    SAY(syscall(SYS_statx, AT_FDCWD, at("numbers"), 0, STATX_BASIC_STATS, &stx));
    SAY((long)stx.stx_size);
    struct stat st;
    SAY(syscall(SYS_fstat, fd, &st));
    SAY((long)st.st_size);
    SAY(syscall(SYS_newfstatat, AT_FDCWD, at("numbers"), &st, 0));
    SAY((long)st.st_size);
    SAY(syscall(SYS_pread64, fd, back, 1000, 50L));
    SAY(memcmp(back + 56, big + 106, 900));
    SAY(syscall(SYS_lseek, fd, 10L, SEEK_SET));
    SAY(syscall(SYS_preadv2, fd, &in, 1, -1L, -1L, 0));
    SAY(syscall(SYS_read, fd, back, 10));
    int copy = syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 100);
    MUST(copy >= 100);
    SAY(syscall(SYS_lseek, copy, 0L, SEEK_CUR));
    SAY(syscall(SYS_write, copy, "copy", 4));
    SAY(syscall(SYS_lseek, fd, 0L, SEEK_CUR));
    SAY(syscall(SYS_ftruncate, fd, 123456L));
    SAY(syscall(SYS_fallocate, fd, 0, 0L, 200000L));
    SAY(syscall(SYS_fsync, fd));
    SAY(syscall(SYS_close, copy));
    SAY(syscall(SYS_close, fd));
    SAY(syscall(SYS_write, fd, "x", 1));
    unsigned long how[3] = {O_RDWR | O_TRUNC, 0, 0};
    fd = syscall(SYS_openat2, AT_FDCWD, at("numbers"), how, sizeof how);
    MUST(fd >= 0);
    SAY(lseek(fd, 0, SEEK_END));
    for (int i = 0; i < 4; i++) MUST(write(fd, big, 50000) == 50000);
    /* A process that is made by number shares the offset. */
    fflush(stdout);
    pid_t pid = syscall(SYS_clone, SIGCHLD, 0L, 0L, 0L, 0L);
    if (pid == 0) {
        put(fd, "child");
        syscall(SYS_exit_group, 0);
    }
    wait_for(pid);
    put(fd, "parent");
    SAY(lseek(fd, 0, SEEK_CUR));
    SAY(syscall(SYS_getpid) == getpid());
    SAY(syscall(SYS_close, 77777));
    SAY(syscall(100000, 1, 2, 3));
}

/* Another process takes a descriptor and uses it at its offset. Not as without the library: it is told that it cannot. */
static void taken(void) {
    int fd = make_rw("taken"), ends[2], back_ends[2];
    char closed;
    fill(big, 200000, 15);
    MUST(pipe(ends) == 0 && pipe(back_ends) == 0);
    int me = syscall(SYS_pidfd_open, getpid(), 0);
    MUST(me >= 0);
    pid_t pid = fork();
    if (pid == 0) {
        char go;
        MUST(close(fd) == 0);
        MUST(write(back_ends[1], "c", 1) == 1);
        MUST(read(ends[0], &go, 1) == 1);
        int theirs = syscall(SYS_pidfd_getfd, me, fd, 0);
        MUST(theirs >= 0);
        say("write", write(theirs, "GGGG", 4));
        say("read", read(theirs, back, 4));
        fflush(stdout);
        _exit(0);
    }
    /* Nobody else has this one, until the child takes it. */
    MUST(read(back_ends[0], &closed, 1) == 1);
    MUST(close(fd) == 0);
    MUST((fd = open(at("taken"), O_RDWR)) >= 0);
    for (int i = 0; i < 8; i++) MUST(write(fd, big + i % 4 * 50000, 50000) == 50000);
    MUST(write(ends[1], "g", 1) == 1);
    wait_for(pid);
    put(fd, "end");
    say("offset", lseek(fd, 0, SEEK_CUR));
    say("size", lseek(fd, 0, SEEK_END));
    MUST(pread(fd, back, 400000, 0) == 400000);
    say("same", memcmp(big, back, 200000) == 0 && memcmp(big, back + 200000, 200000) == 0);
}

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    {"sizes", sizes}, {"seeks", seeks}, {"vectors", vectors}, {"forks", forks},
    {"forks-at-once", forks_at_once}, {"appends", appends},
    {"whole-appends", whole_appends},
    {"reuse", reuse}, {"empty-paths", empty_paths}, {"locks", locks}, {"longs", longs},
    {"old-stats", old_stats}, {"mapped-again", mapped_again}, {"execs", execs}, {"exec", exec_of_one_that_wrote},
    {"vforks", vforks}, {"spawns", spawns}, {"dups", dups},
    {"closes", closes}, {"raw-closes", raw_closes}, {"rights", rights}, {"relative", relative},
    {"handlers", handlers}, {"threads", threads}, {"bad-pointers", bad_pointers}, {"both-ways", both_ways},
    {"bad-buffers", bad_buffers}, {"statx-of-nothing", statx_of_nothing},
    {"stdio", stdio}, {"transfers", transfers}, {"asynchronous", asynchronous}, {"fortified", fortified},
    {"relative-locks", relative_locks}, {"kept-locks", kept_locks}, {"positions", positions}, {"numbers", numbers}, {"taken", taken},
    {"limits", limits}, {"readers", readers}, {"lists", lists}, {"huge-offsets", huge_offsets},
};

/* A constructor that writes before those of preloaded libraries may have run, and a destructor. */
static void note(const char *text) {
    const char *early = getenv("PRELOAD_EARLY");
    if (!early) return;
    int fd = open(early, O_CREAT | O_APPEND | O_WRONLY, 0644);
    if (fd < 0 || write(fd, text, strlen(text)) < 0) abort();
    close(fd);
}
__attribute__((constructor)) static void early(void) { note("early\n"); }
__attribute__((destructor)) static void late(void) { note("late\n"); }

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOFBF, 1 << 16);
    if (argc < 3 || readlink("/proc/self/exe", self, sizeof self - 1) < 0) return 2;
    dir = argv[1];
    if (strcmp(argv[2], "go-on") == 0) {
        go_on(argv[3]);
        return 0;
    }
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (strcmp(argv[2], cases[i].name) == 0) {
            cases[i].run();
            return 0;
        }
    return 2;
}
