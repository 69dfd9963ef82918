// Shows Slurm a machine that has cgroup v2 alone. It takes one with hierarchies of v1 beside v2 for a machine without v2, and asks
// /proc/self/cgroup, at its start and whenever it has moved itself. Of that file it is given the line of v2.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int open_line_of_v2(const char *path) {
    char line[4096];
    FILE *all = fopen(path, "re");
    int only = memfd_create("cgroup", MFD_CLOEXEC);
    while (all != NULL && fgets(line, sizeof line, all) != NULL)
        if (strncmp(line, "0::", 3) == 0 && write(only, line, strlen(line)) < 0)
            break;
    if (all != NULL)
        fclose(all);
    lseek(only, 0, SEEK_SET);
    return only;
}

static int open_any(const char *name, const char *path, int flags, mode_t mode) {
    int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, name);
    return strcmp(path, "/proc/self/cgroup") == 0 ? open_line_of_v2(path) : real(path, flags, mode);
}

#define OPEN(NAME)                                                 \
    int NAME(const char *path, int flags, ...) {                   \
        va_list more;                                              \
        va_start(more, flags);                                     \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more);                                              \
        return open_any(#NAME, path, flags, mode);                 \
    }

OPEN(open)
OPEN(open64)
