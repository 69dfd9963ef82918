/* How much stack each call takes of its caller: made on a stack of its own, which is filled before and looked at after.
 *
 * usage: stacks DIR
 * Prints a line "CALL: BYTES" for each. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

enum { STACK = 256 << 10, FILL = 0xa7 };
static unsigned char *stack;
static ucontext_t outside, inside;
static void (*call)(void);
static char path[4096], data[400000];
static int fd, reader, appender, other;
static struct stat st;
static struct statx stx;

static void run(void) { call(); }

static void measure(const char *name, void (*function)(void)) {
    memset(stack, FILL, STACK);
    call = function;
    getcontext(&inside);
    inside.uc_stack.ss_sp = stack;
    inside.uc_stack.ss_size = STACK;
    inside.uc_link = &outside;
    makecontext(&inside, run, 0);
    swapcontext(&outside, &inside);
    size_t untouched = 0;
    while (untouched < STACK && stack[untouched] == FILL) untouched++;
    printf("%s: %zu\n", name, STACK - untouched);
}

static void check(int ok) {
    if (!ok) abort();
}

static void make(void) { fd = open(path, O_CREAT | O_RDWR | O_TRUNC, 0644); }
static void first_write(void) { check(write(fd, data, 4096) == 4096); }
static void short_write(void) { check(write(fd, data, 64) == 64); }
static void long_write(void) { check(write(fd, data, 300000) == 300000); }
static void vectors(void) {
    struct iovec parts[3] = {{data, 10}, {data, 300000}, {data, 7}};
    check(writev(fd, parts, 3) == 300017);
}
static void pwrite_again(void) { check(pwrite(fd, data, 300000, 100) == 300000); }
static void seek(void) { check(lseek(fd, 0, SEEK_END) > 0); }
static void pread_written(void) { check(pread(fd, data, 100000, 0) == 100000); }
static void fstat_fd(void) { check(fstat(fd, &st) == 0); }
static void stat_path(void) { check(stat(path, &st) == 0); }
static void statx_number(void) { check(syscall(SYS_statx, AT_FDCWD, path, 0, STATX_BASIC_STATS, &stx) == 0); }
static void cut(void) { check(ftruncate(fd, 350000) == 0); }
static void sync_fd(void) { check(fsync(fd) == 0); }
static void lock(void) { check(lockf(fd, F_LOCK, 10) == 0); }
static void copy(void) { check((other = dup(fd)) >= 0); }
static void close_copy(void) { check(close(other) == 0); }
static void write_shared(void) { check(write(fd, data, 300000) == 300000); }
static void close_fd(void) { check(close(fd) == 0); }
static void open_reader(void) { check((reader = open(path, O_RDONLY)) >= 0); }
static void first_read(void) { check(read(reader, data, 200000) == 200000); }
static void short_read(void) { check(read(reader, data, 100) == 100); }
static void rewind_reader(void) { check(lseek(reader, 0, SEEK_SET) == 0); }
static void send(void) {
    ssize_t sent = sendfile(1, reader, NULL, 0);
    (void)sent;
}
static void close_reader(void) { check(close(reader) == 0); }
static void open_appender(void) { check((appender = open(path, O_WRONLY | O_APPEND)) >= 0); }
static void append(void) { check(write(appender, data, 300000) == 300000); }
static void close_appender(void) { check(close(appender) == 0); }
static void cut_path(void) { check(truncate(path, 1000) == 0); }
static void times(void) { check(utimensat(AT_FDCWD, path, NULL, 0) == 0); }

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    snprintf(path, sizeof path, "%s/stacks", argv[1]);
    stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(stack != MAP_FAILED);
#define MEASURE(x) measure(#x, x)
    MEASURE(make), MEASURE(first_write), MEASURE(short_write), MEASURE(long_write), MEASURE(vectors);
    MEASURE(pwrite_again), MEASURE(seek), MEASURE(pread_written), MEASURE(fstat_fd), MEASURE(stat_path);
    MEASURE(statx_number), MEASURE(long_write), MEASURE(cut), MEASURE(sync_fd), MEASURE(long_write), MEASURE(lock);
    MEASURE(copy), MEASURE(write_shared), MEASURE(close_copy), MEASURE(close_fd);
    MEASURE(open_reader), MEASURE(first_read), MEASURE(short_read), MEASURE(rewind_reader), MEASURE(first_read);
    MEASURE(send), MEASURE(close_reader), MEASURE(open_appender), MEASURE(append), MEASURE(close_appender);
    MEASURE(cut_path), MEASURE(times);
    return 0;
}
