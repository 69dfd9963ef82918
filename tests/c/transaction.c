/*
 * transaction - transactions by libfirn.
 *
 *     transaction steps DIR            begins, writes, prepares, commits, aborts and restores in DIR
 *     transaction errors DIR OTHER     every error on a mount with transactions; OTHER is on no mount
 *     transaction refused DIR          on a mount without transactions
 *
 * Exit: 0 as expected; 1 not.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <firn.h>

static void die(const char *what, int error)
{
    fprintf(stderr, "%s: %d (%s; %s)\n", what, error, firn_strerror(error), firn_error_message());
    exit(1);
}

#define MUST(call)                        \
    do {                                  \
        int error_ = (call);              \
        if (error_)                       \
            die(#call, error_);           \
    } while (0)

/* The call fails so, and says something about it. */
#define FAILS(expected, call)                                                              \
    do {                                                                                   \
        int error_ = (call);                                                               \
        if (error_ != (expected) || !*firn_error_message() || !*firn_strerror(expected)) { \
            fprintf(stderr, "%d expected: ", (expected));                                  \
            die(#call, error_);                                                            \
        }                                                                                  \
    } while (0)

#define HOLDS(condition)                                      \
    do {                                                      \
        if (!(condition)) {                                   \
            fprintf(stderr, "not so: %s\n", #condition);      \
            exit(1);                                          \
        }                                                     \
    } while (0)

static const char *at(const char *dir, const char *name)
{
    static char path[4096];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static void put(const char *dir, const char *name, const char *text)
{
    int file = open(at(dir, name), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    HOLDS(file >= 0 && write(file, text, strlen(text)) == (ssize_t)strlen(text) && close(file) == 0);
}

static int has(const char *dir, const char *name, const char *text)
{
    char found[256] = "";
    int file = open(at(dir, name), O_RDONLY);
    if (file < 0)
        return 0;
    ssize_t count = read(file, found, sizeof found - 1);
    close(file);
    return count == (ssize_t)strlen(text) && strcmp(found, text) == 0;
}

static int steps(const char *dir)
{
    firn *mount;
    struct stat gone;
    uint64_t id = 0;
    MUST(firn_open(dir, &mount));

    put(dir, "file", "first");
    MUST(firn_begin(mount, dir));
    put(dir, "file", "second");
    HOLDS(has(dir, "file", "second"));
    MUST(firn_prepare(mount, dir, 17));
    MUST(firn_prepare(mount, dir, 17));
    MUST(firn_commit(mount, dir, FIRN_NEXT_ID, FIRN_BEGIN_NEXT, &id));
    HOLDS(id == 17 && has(dir, "file", "second"));

    /* The next one is open. */
    put(dir, "file", "third");
    put(dir, "new", "third");
    MUST(firn_abort(mount, dir));
    HOLDS(has(dir, "file", "second") && stat(at(dir, "new"), &gone) == -1 && errno == ENOENT);

    MUST(firn_begin(mount, dir));
    put(dir, "file", "fourth");
    MUST(firn_commit(mount, dir, FIRN_NEXT_ID, 0, &id));
    HOLDS(id == 18);
    FAILS(ENOENT, firn_commit(mount, dir, FIRN_NEXT_ID, 0, &id));

    MUST(firn_begin(mount, dir));
    put(dir, "file", "after 18");
    MUST(firn_restore(mount, dir, 18));
    HOLDS(has(dir, "file", "fourth"));

    /* A restore finishes what was prepared. */
    MUST(firn_begin(mount, dir));
    put(dir, "file", "fifth");
    MUST(firn_prepare(mount, dir, 40));
    MUST(firn_restore(mount, dir, 40));
    HOLDS(has(dir, "file", "fifth"));
    MUST(firn_begin(mount, dir));
    MUST(firn_commit(mount, dir, 50, 0, NULL));

    /* Carried out behind; the next one is aborted, or open, meanwhile or later. */
    MUST(firn_begin(mount, dir));
    put(dir, "file", "sixth");
    MUST(firn_commit(mount, dir, 60, FIRN_COMMIT_ASYNC | FIRN_BEGIN_NEXT, &id));
    HOLDS(id == 60 && has(dir, "file", "sixth"));
    MUST(firn_abort(mount, dir));
    MUST(firn_begin(mount, dir));
    put(dir, "file", "fifth");
    MUST(firn_commit(mount, dir, FIRN_NEXT_ID, FIRN_COMMIT_ASYNC, &id));
    HOLDS(id == 61 && has(dir, "file", "fifth"));
    MUST(firn_begin(mount, dir));
    MUST(firn_commit(mount, dir, FIRN_NEXT_ID, 0, &id));
    HOLDS(id == 62);

    /* A directory of its own. */
    char made[4096];
    struct stat found;
    snprintf(made, sizeof made, "%s/made", dir);
    umask(027);
    MUST(firn_begin_create(mount, made, 0777));
    HOLDS(stat(made, &found) == 0 && (found.st_mode & 07777) == 0750);
    MUST(firn_abort(mount, made));
    HOLDS(stat(made, &gone) == -1 && errno == ENOENT);
    MUST(firn_begin_create(mount, made, 0700));
    put(made, "file", "made");
    MUST(firn_commit(mount, made, FIRN_NEXT_ID, 0, &id));
    HOLDS(id == 1 && has(made, "file", "made"));
    firn_close(mount);
    return 0;
}

static int errors(const char *dir, const char *other)
{
    firn *mount;
    uint64_t id = 7;
    char below[4096], missing[4096], file[4096], bytes[4096];
    snprintf(below, sizeof below, "%s/below", dir);
    snprintf(missing, sizeof missing, "%s/missing", dir);
    snprintf(file, sizeof file, "%s/file", dir);
    snprintf(bytes, sizeof bytes, "%s/\xff\xfe", dir);
    MUST(firn_open(dir, &mount));
    HOLDS(mkdir(below, 0700) == 0);
    put(dir, "file", "text");

    /* There is none. */
    FAILS(ENOENT, firn_prepare(mount, dir, 1));
    FAILS(ENOENT, firn_commit(mount, dir, 1, 0, &id));
    FAILS(ENOENT, firn_abort(mount, dir));
    FAILS(EINVAL, firn_restore(mount, dir, 1));
    HOLDS(id == 7);

    /* It cannot be there. */
    FAILS(ENOENT, firn_begin(mount, missing));
    FAILS(ENOTDIR, firn_begin(mount, file));
    FAILS(ENODEV, firn_begin(mount, other));
    FAILS(ENOENT, firn_begin(mount, bytes));
    FAILS(EINVAL, firn_begin(mount, NULL));
    FAILS(EINVAL, firn_begin(NULL, dir));

    FAILS(EEXIST, firn_begin_create(mount, below, 0700));
    FAILS(ENOTDIR, firn_begin_create(mount, at(file, "new"), 0700));
    FAILS(ENOENT, firn_begin_create(mount, at(missing, "new"), 0700));
    FAILS(EINVAL, firn_begin_create(mount, NULL, 0700));

    MUST(firn_begin(mount, dir));
    FAILS(EBUSY, firn_begin_create(mount, missing, 0700));
    FAILS(EBUSY, firn_begin(mount, dir));
    FAILS(EBUSY, firn_begin(mount, below));
    FAILS(ENOENT, firn_commit(mount, below, 1, 0, &id));
    FAILS(EINVAL, firn_commit(mount, dir, 1, 0x80, &id));
    FAILS(EINVAL, firn_prepare(mount, dir, FIRN_NEXT_ID));
    FAILS(EINVAL, firn_restore(mount, dir, FIRN_NEXT_ID));
    FAILS(EINVAL, firn_restore(mount, dir, 3));

    /* Another number. */
    MUST(firn_prepare(mount, dir, 5));
    FAILS(EINVAL, firn_prepare(mount, dir, 6));
    FAILS(EINVAL, firn_commit(mount, dir, 6, 0, &id));
    FAILS(EINVAL, firn_restore(mount, dir, 6));
    HOLDS(id == 7);
    MUST(firn_abort(mount, dir));

    /* Errors of firnd leave the handle as it was; after a close there is none. */
    MUST(firn_begin(mount, dir));
    MUST(firn_abort(mount, dir));
    firn_close(mount);
    return 0;
}

static int refused(const char *dir)
{
    firn *mount;
    MUST(firn_open(dir, &mount));
    FAILS(EOPNOTSUPP, firn_begin(mount, dir));
    FAILS(EOPNOTSUPP, firn_commit(mount, dir, FIRN_NEXT_ID, 0, NULL));
    firn_close(mount);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "steps") == 0)
        return steps(argv[2]);
    if (argc == 4 && strcmp(argv[1], "errors") == 0)
        return errors(argv[2], argv[3]);
    if (argc == 3 && strcmp(argv[1], "refused") == 0)
        return refused(argv[2]);
    fprintf(stderr, "usage: transaction steps DIR | errors DIR OTHER | refused DIR\n");
    return 1;
}
