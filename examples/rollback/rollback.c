/*
 * rollback - a program that has to be rolled back together with its files.
 *
 * How far it is, it knows from its memory only. In each step it
 *   counter   reads a number in a file that stays open, and writes the next one in its place;
 *   mapping   does the same in a shared mapping of a file, without a call that writes;
 *   log       opens a file, appends a line and closes it;
 *   journal   appends a line to a file that stays open;
 *   state     replaces a file: a temporary file is written and renamed;
 *   queue     makes work.N, renames work.N-1 to done.N-1, reads and removes done.N-4;
 * and checks that each file is what it left in the step before. When its memory is taken back to a checkpoint
 * and its files are not, it says which of them is wrong and ends with 1.
 *
 *     rollback [--steps COUNT] [--pause MS] [--tell FILE] [--save FILE] [--load FILE] DIR [PART]...
 *
 * The file of --tell has the number of the last step, for who watches; the program never reads it. It knows of no
 * file system in particular, nor of who checkpoints it. CRIU does so from outside. For where CRIU cannot, SIGUSR1
 * makes it write its memory to the file of --save and stop until SIGCONT, as if it were frozen, and --load
 * goes on from such a file.
 *
 * Exit: 0 all steps done, DIR/result is written; 1 a file is wrong, or failed; 2 usage.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Every line of log and journal, and every small file, has this many bytes. */
enum { LINE_BYTES = 26 };
/* Steps for which the queue keeps what is done. */
enum { KEPT_STEPS = 4 };

/* What a checkpoint of this program's memory has to bring back. */
static struct {
    uint64_t step;
    /* Grows from what was read: one wrong byte changes the result. */
    uint64_t sum;
} memory;

static int counter = -1, journal = -1;
static volatile uint64_t *mapping;
static volatile sig_atomic_t save_wanted;

static void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "rollback: step %llu: ", (unsigned long long)memory.step);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}

static int must(int result, const char *what, const char *path)
{
    if (result < 0)
        die("%s: cannot %s: %s", path, what, strerror(errno));
    return result;
}

/* What the files have of a step. */
static void line_of(uint64_t step, char line[LINE_BYTES + 1])
{
    snprintf(line, LINE_BYTES + 1, "step %020llu\n", (unsigned long long)step);
}

static void put(int fd, const char *path, const void *bytes, size_t count)
{
    if (write(fd, bytes, count) != (ssize_t)count)
        die("%s: cannot write: %s", path, strerror(errno));
}

static void put_file(const char *path, int flags, uint64_t step)
{
    char line[LINE_BYTES + 1];
    line_of(step, line);
    int fd = open(path, O_WRONLY | O_CREAT | flags, 0644);
    if (fd < 0 && errno == EEXIST)
        die("%s is there already: it was made after the checkpoint", path);
    must(fd, "create", path);
    put(fd, path, line, LINE_BYTES);
    must(close(fd), "close", path);
}

/* Reads a small file that must be that of a step. */
static void take_file(const char *path, uint64_t step)
{
    char found[LINE_BYTES + 2] = "", expected[LINE_BYTES + 1];
    int fd = open(path, O_RDONLY);
    if (fd < 0 && errno == ENOENT)
        die("%s is missing: it was removed or renamed after the checkpoint", path);
    must(fd, "open", path);
    must((int)read(fd, found, LINE_BYTES + 1), "read", path);
    must(close(fd), "close", path);
    line_of(step, expected);
    if (strcmp(found, expected) != 0)
        die("%s is not that of step %llu: it was replaced after the checkpoint", path, (unsigned long long)step);
    for (const char *at = found; *at; at++)
        memory.sum = memory.sum * 31 + (unsigned char)*at;
}

static void take_number(const char *path, uint64_t found)
{
    if (found != memory.step - 1)
        die("%s reads %llu, not %llu: it was written after the checkpoint", path, (unsigned long long)found,
            (unsigned long long)(memory.step - 1));
    memory.sum = memory.sum * 31 + found;
}

static void do_counter(void)
{
    uint64_t found = 0;
    must((int)pread(counter, &found, sizeof found, 0), "read", "counter");
    take_number("counter", found);
    if (pwrite(counter, &memory.step, sizeof memory.step, 0) != sizeof memory.step)
        die("counter: cannot write: %s", strerror(errno));
}

static void do_mapping(void)
{
    take_number("mapping", *mapping);
    *mapping = memory.step;
}

/* The descriptor is closed: nothing but the mapping leads to the file. */
static void open_mapping(void)
{
    int fd = must(open("mapping", O_RDWR | O_CREAT, 0644), "open", "mapping");
    must(ftruncate(fd, sizeof *mapping), "truncate", "mapping");
    void *at = mmap(NULL, sizeof *mapping, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED)
        die("mapping: cannot map: %s", strerror(errno));
    mapping = at;
    must(close(fd), "close", "mapping");
}

static void append(int fd, const char *path)
{
    struct stat stat;
    char line[LINE_BYTES + 1];
    line_of(memory.step, line);
    put(fd, path, line, LINE_BYTES);
    must(fstat(fd, &stat), "stat", path);
    if ((uint64_t)stat.st_size != memory.step * LINE_BYTES)
        die("%s has %llu lines, not %llu: what was appended after the checkpoint is there twice", path,
            (unsigned long long)stat.st_size / LINE_BYTES, (unsigned long long)memory.step);
}

static void do_log(void)
{
    int fd = must(open("log", O_WRONLY | O_CREAT | O_APPEND, 0644), "open", "log");
    append(fd, "log");
    must(close(fd), "close", "log");
}

static void do_journal(void)
{
    append(journal, "journal");
}

static void do_state(void)
{
    if (memory.step > 1)
        take_file("state", memory.step - 1);
    put_file("state.tmp", O_TRUNC, memory.step);
    must(rename("state.tmp", "state"), "rename", "state.tmp");
}

static void do_queue(void)
{
    char work[32], done[32];
    uint64_t step = memory.step;
    if (step > 1) {
        snprintf(work, sizeof work, "work.%llu", (unsigned long long)(step - 1));
        snprintf(done, sizeof done, "done.%llu", (unsigned long long)(step - 1));
        if (rename(work, done) < 0 && errno == ENOENT)
            die("%s is missing: it was removed or renamed after the checkpoint", work);
    }
    if (step > KEPT_STEPS) {
        snprintf(done, sizeof done, "done.%llu", (unsigned long long)(step - KEPT_STEPS));
        take_file(done, step - KEPT_STEPS);
        must(unlink(done), "remove", done);
    }
    snprintf(work, sizeof work, "work.%llu", (unsigned long long)step);
    put_file(work, O_EXCL, step);
}

static const struct part {
    const char *name;
    void (*run)(void);
} PARTS[] = {
    {"counter", do_counter}, {"mapping", do_mapping}, {"log", do_log},
    {"journal", do_journal}, {"state", do_state},     {"queue", do_queue},
};
enum { PART_COUNT = sizeof PARTS / sizeof *PARTS };

static int part_named(const char *name)
{
    for (int at = 0; at < PART_COUNT; at++)
        if (strcmp(PARTS[at].name, name) == 0)
            return at;
    return -1;
}

static void want_save(int signal)
{
    (void)signal;
    save_wanted = 1;
}

/* An application-level checkpoint. Nothing changes from here to SIGCONT. */
static void save(const char *path)
{
    if (mapping)
        must(msync((void *)mapping, sizeof *mapping, MS_SYNC), "sync", "mapping");
    int fd = must(open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644), "create", path);
    put(fd, path, &memory, sizeof memory);
    must(fsync(fd), "sync", path);
    must(close(fd), "close", path);
    save_wanted = 0;
    raise(SIGSTOP);
}

static void load(const char *path)
{
    int fd = must(open(path, O_RDONLY), "open", path);
    if (read(fd, &memory, sizeof memory) != sizeof memory)
        die("%s: not a checkpoint", path);
    close(fd);
}

/* Not kept open: CRIU would want its length to be as it was. */
static void tell(const char *path)
{
    char line[LINE_BYTES + 1];
    line_of(memory.step, line);
    int fd = must(open(path, O_WRONLY | O_CREAT, 0644), "open", path);
    put(fd, path, line, LINE_BYTES);
    must(close(fd), "close", path);
}

static void write_result(void)
{
    FILE *file = fopen("result.tmp", "w");
    if (!file)
        die("result.tmp: cannot create: %s", strerror(errno));
    fprintf(file, "steps %llu\nsum %016llx\n", (unsigned long long)memory.step, (unsigned long long)memory.sum);
    if (fclose(file) != 0)
        die("result.tmp: cannot write: %s", strerror(errno));
    must(rename("result.tmp", "result"), "rename", "result.tmp");
}

static int usage(void)
{
    fputs("usage: rollback [--steps COUNT] [--pause MS] [--tell FILE] [--save FILE] [--load FILE] DIR [PART]...\n"
          "parts: counter mapping log journal state queue (all)\n", stderr);
    return 2;
}

int main(int argc, char **argv)
{
    uint64_t steps = 100;
    long pause_ms = 10;
    const char *tell_in = NULL, *save_to = NULL, *load_from = NULL;
    int at = 1, wanted = 0;
    for (; at + 1 < argc && argv[at][0] == '-'; at += 2) {
        if (strcmp(argv[at], "--steps") == 0)
            steps = strtoull(argv[at + 1], NULL, 10);
        else if (strcmp(argv[at], "--pause") == 0)
            pause_ms = strtol(argv[at + 1], NULL, 10);
        else if (strcmp(argv[at], "--tell") == 0)
            tell_in = argv[at + 1];
        else if (strcmp(argv[at], "--save") == 0)
            save_to = argv[at + 1];
        else if (strcmp(argv[at], "--load") == 0)
            load_from = argv[at + 1];
        else
            return usage();
    }
    if (at >= argc || argv[at][0] == '-')
        return usage();
    const char *dir = argv[at++];
    for (; at < argc; at++) {
        int part = part_named(argv[at]);
        if (part < 0)
            return usage();
        wanted |= 1 << part;
    }
    if (wanted == 0)
        wanted = (1 << PART_COUNT) - 1;

    if (load_from)
        load(load_from);
    must(chdir(dir), "enter", dir);
    if (wanted & 1 << part_named("counter"))
        counter = must(open("counter", O_RDWR | O_CREAT, 0644), "open", "counter");
    if (wanted & 1 << part_named("mapping"))
        open_mapping();
    if (wanted & 1 << part_named("journal"))
        journal = must(open("journal", O_WRONLY | O_CREAT | O_APPEND, 0644), "open", "journal");
    if (save_to)
        signal(SIGUSR1, want_save);

    struct timespec pause = {pause_ms / 1000, pause_ms % 1000 * 1000000};
    while (memory.step < steps) {
        memory.step++;
        for (int part = 0; part < PART_COUNT; part++)
            if (wanted & 1 << part)
                PARTS[part].run();
        if (tell_in)
            tell(tell_in);
        if (save_wanted)
            save(save_to);
        nanosleep(&pause, NULL);
    }
    write_result();
    return 0;
}
