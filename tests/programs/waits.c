/* Writes to a file and comes to wait for firnd: waits HOW FILE LOG.
 *
 * HOW: room (writes until there is no room, and on), fsync, close, sleep (with the file open), exit (with the file open).
 * LOG gets a line with the bytes that are written so far after each write, and one with what the call returned that
 * waited. A block has the same byte throughout, by its place in the file. A handler for SIGUSR1 does nothing.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCK = 100000, FEW = 20, MANY = 400 };

static int log_fd;

static void say(const char *word, long long value) {
    char line[64];
    int len = snprintf(line, sizeof line, "%s %lld\n", word, value);
    if (write(log_fd, line, len) != len) abort();
}

static void ignore(int signal) { (void)signal; }

static void result(int returned) { say(returned == 0 ? "done" : errno == EINTR ? "EINTR" : "failed", errno); }

int main(int argc, char **argv) {
    static char block[BLOCK];
    struct sigaction action = {.sa_handler = ignore};
    if (argc != 4 || sigaction(SIGUSR1, &action, NULL)) return 2;
    // A shell starts what it runs in the background with SIGINT ignored, and the tests may run so.
    signal(SIGINT, SIG_DFL);
    const char *how = argv[1];
    log_fd = open(argv[3], O_WRONLY | O_CREAT | O_APPEND, 0644);
    int fd = open(argv[2], O_WRONLY);
    if (log_fd < 0 || fd < 0) return 2;
    long long written = 0, end = (long long)BLOCK * (strcmp(how, "room") ? FEW : MANY);
    while (written < end) {
        memset(block, 'a' + written / BLOCK % 26, BLOCK);
        ssize_t len = write(fd, block, BLOCK - written % BLOCK);
        if (len < 0 && errno == EINTR) {
            say("EINTR", written);
            continue;
        }
        if (len <= 0) return 3;
        written += len;
        say("written", written);
    }
    say("waits", getpid());
    if (!strcmp(how, "fsync")) {
        int returned;
        do result(returned = fsync(fd)); while (returned && errno == EINTR);
    }
    if (!strcmp(how, "close")) result(close(fd));
    if (!strcmp(how, "sleep")) pause();
    return 0;
}
