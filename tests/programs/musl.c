/* What a program of musl does in a directory: calls that the preload library puts itself before, also where it does nothing.
 *
 * usage: musl DIR */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
static char data[300000];

#define MUST(x) ((x) ? (void)0 : (printf("failed: %s (%s)\n", #x, strerror(errno)), exit(1)))
#define SAY(x) printf("%s: %lld\n", #x, (long long)(x))

static void *write_more(void *file) {
    MUST(write(*(int *)file, data, 1000) == 1000);
    return NULL;
}

int main(int argc, char **argv) {
    MUST(argc > 1 && chdir(argv[1]) == 0);
    memset(data, 'm', sizeof data);
    int fd = open("file", O_CREAT | O_RDWR | O_TRUNC, 0644), status, count;
    MUST(fd >= 0);
    for (int i = 0; i < 4; i++) SAY(write(fd, data, 50000));
    struct iovec parts[2] = {{data, 10}, {data, 70000}};
    SAY(writev(fd, parts, 2));
    SAY(pwritev(fd, parts, 2, 5));
    SAY(pwrite(fd, "p", 1, 100));
    SAY(dprintf(fd, "%s %d %f", "text", 7, 2.5));
    SAY(lseek(fd, 0, SEEK_CUR));
    SAY(lockf(fd, F_LOCK, 10));
    SAY(ioctl(fd, FIONREAD, &count));
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_END, .l_start = -10, .l_len = 5};
    SAY(fcntl(fd, F_SETLK, &lock));
    struct stat st;
    SAY(fstat(fd, &st) + stat("file", &st) + lstat("file", &st) + fstatat(AT_FDCWD, "file", &st, 0));
    SAY(st.st_size);
    SAY(ftruncate(fd, 250000));
    SAY(posix_fallocate(fd, 0, 260000));
    SAY(fsync(fd) + fdatasync(fd));
    SAY(pread(fd, data, 1000, 50));
    int copy = dup(fd), to = openat(AT_FDCWD, "copy", O_CREAT | O_WRONLY, 0600);
    SAY(write(copy, "copy", 4));
    SAY(lseek(fd, 0, SEEK_SET));
    SAY(sendfile(to, fd, NULL, 100000));
    SAY(syscall(SYS_lseek, fd, 0L, SEEK_CUR));
    SAY(syscall(SYS_close, copy));
    void *map = mmap(NULL, 100000, PROT_READ, MAP_SHARED, fd, 0);
    SAY(memcmp(map, data, 50));
    SAY(munmap(map, 100000));
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        MUST(write(fd, "child", 5) == 5);
        _exit(7);
    }
    MUST(waitpid(pid, &status, 0) == pid);
    SAY(WEXITSTATUS(status));
    pid = vfork();
    if (pid == 0) _exit(8);
    MUST(waitpid(pid, &status, 0) == pid);
    SAY(WEXITSTATUS(status));
    char *words[] = {"sh", "-c", "echo spawned", NULL};
    MUST(posix_spawn(&pid, "/bin/sh", NULL, NULL, words, environ) == 0);
    MUST(waitpid(pid, &status, 0) == pid);
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, write_more, &fd) == 0 && pthread_join(thread, NULL) == 0);
    int ends[2];
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 1};
    SAY(sendmsg(ends[0], &message, 0));
    FILE *file = fopen("stream", "w+");
    for (int i = 0; i < 5000; i++) fprintf(file, "line %d\n", i);
    rewind(file);
    SAY(fscanf(file, "line %d", &count));
    SAY(fclose(file));
    file = fdopen(fd, "r+");
    SAY(fseek(file, 0, SEEK_END));
    SAY(ftell(file));
    SAY(freopen("stream", "a", file) != NULL);
    SAY(fputs("appended", file) >= 0);
    SAY(fclose(file));
    file = popen("echo popened", "r");
    SAY(fgetc(file));
    SAY(pclose(file));
    SAY(system("exit 3"));
    fflush(stdout);
    execl("/bin/sh", "sh", "-c", "wc -c file copy stream", (char *)NULL);
    return 1;
}
