/*
 * state - asks for the state of a mount, drains and waits.
 *
 *     state drain FILE BYTES    FILE holds BYTES that are not in the backing: drains them, and looks
 *     state late FILE           FILE cannot be drained now: waiting for it ends in time
 *     state room FILE           FILE has the level held, then drained, and there is room for less than all
 *     state steps FILE DIR BYTES  DIR, a directory of the mount, has the whole checkpoint step_7 of BYTES, and nothing else
 *     state older FILE          fills structures of programs that were compiled with smaller ones
 *
 * Exit: 0 as expected; 1 not.
 */
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <firn.h>

static void must(const char *what, int error)
{
    if (error) {
        fprintf(stderr, "%s: %d (%s; %s)\n", what, error, firn_strerror(error), firn_error_message());
        exit(1);
    }
}

#define MUST(call) must(#call, (call))
#define HOLDS(condition) must("not so: " #condition, !(condition))

static void drain(firn *mount, const char *file, unsigned long long bytes)
{
    struct firn_status status = {.size = sizeof status};

    MUST(firn_status(mount, &status));
    HOLDS(status.size == sizeof status && status.held_bytes == bytes && status.held_files == 1);
    HOLDS(status.arena_used_bytes >= bytes && status.arena_bytes >= status.arena_used_bytes);
    HOLDS(status.pid > 1 && status.drain_errors == 0 && status.spill_bytes == 0);
    MUST(firn_drain(mount, file));
    MUST(firn_wait(mount, file, FIRN_DRAINED, FIRN_FOREVER));
    MUST(firn_wait(mount, file, FIRN_DURABLE, 60000));
    MUST(firn_status(mount, &status));
    HOLDS(status.held_bytes == 0 && status.held_files == 0 && status.oldest_held_ms == 0);
    HOLDS(status.drained_bytes == bytes);
    HOLDS(firn_wait(mount, file, (enum firn_durability)7, 0) == EINVAL);
    HOLDS(firn_wait(mount, "/", FIRN_DRAINED, 0) == ENODEV);
    HOLDS(firn_drain(mount, NULL) == EINVAL && firn_status(mount, NULL) == EINVAL);
    HOLDS(firn_status(NULL, &status) == EINVAL);
}

static void late(firn *mount, const char *file)
{
    struct firn_status status = {.size = sizeof status};

    HOLDS(firn_wait(mount, file, FIRN_DRAINED, 50) == ETIMEDOUT);
    /* The handle goes on. */
    MUST(firn_status(mount, &status));
    HOLDS(status.held_files == 1);
}

static void room(firn *mount, const char *file)
{
    struct firn_status status = {.size = sizeof status};
    struct firn_room room = {.size = sizeof room};
    enum firn_durability level;

    MUST(firn_get_durability(mount, file, &level));
    HOLDS(level == FIRN_HELD);
    MUST(firn_status(mount, &status));
    MUST(firn_get_room(mount, &room));
    HOLDS(room.memory_bytes > 0 && room.memory_bytes < status.arena_bytes);
    HOLDS(room.spill_bytes == 0 && room.backing_bytes > 0);
    MUST(firn_wait(mount, file, FIRN_DURABLE, FIRN_FOREVER));
    MUST(firn_get_durability(mount, file, &level));
    HOLDS(level == FIRN_DURABLE);
    HOLDS(firn_get_durability(mount, "/", &level) == ENODEV);
    HOLDS(firn_get_durability(mount, file, NULL) == EINVAL && firn_get_room(mount, NULL) == EINVAL);
}

static void steps(const char *dir, unsigned long long bytes)
{
    firn_checkpoint_list *list;
    const struct firn_checkpoint *items;

    MUST(firn_list_checkpoints(dir, &list));
    HOLDS(firn_checkpoint_list_count(list) == 1);
    items = firn_checkpoint_list_items(list);
    HOLDS(strcmp(items->name, "step_7") == 0 && items->step == 7 && items->directory == 1);
    HOLDS(items->bytes == bytes && items->files == 1 && items->modified_s > 0);
    HOLDS(items->state == FIRN_WHOLE && items->level == FIRN_HELD);
    firn_checkpoint_list_free(list);
    firn_checkpoint_list_free(NULL);
    HOLDS(firn_checkpoint_list_count(NULL) == 0 && firn_checkpoint_list_items(NULL) == NULL);
    HOLDS(firn_list_checkpoints("/does-not-exist", &list) == ENOENT);
    HOLDS(firn_list_checkpoints(NULL, &list) == EINVAL && firn_list_checkpoints(dir, NULL) == EINVAL);
    /* No mount: nobody knows. */
    MUST(firn_list_checkpoints("/proc/self", &list));
    firn_checkpoint_list_free(list);
}

/* What is behind the size that a structure says it has is not touched. */
static void older(firn *mount)
{
    struct firn_status status;
    struct firn_data_region region;
    unsigned char untouched[sizeof status];

    memset(untouched, 0x5a, sizeof untouched);
    memset(&status, 0x5a, sizeof status);
    status.size = offsetof(struct firn_status, held_files);
    MUST(firn_status(mount, &status));
    HOLDS(status.size == offsetof(struct firn_status, held_files));
    HOLDS(memcmp(&status.held_files, untouched, sizeof status - status.size) == 0);
    HOLDS(memcmp(&status.held_bytes, untouched, sizeof status.held_bytes) != 0);

    memset(&region, 0x5a, sizeof region);
    region.size = offsetof(struct firn_data_region, path);
    MUST(firn_map_region(mount, &region));
    HOLDS(memcmp(&region.path, untouched, sizeof region - region.size) == 0);
    HOLDS(region.address && region.bytes % region.chunk_bytes == 0);

    status.size = 0;
    HOLDS(firn_status(mount, &status) == EINVAL);
}

int main(int argc, char **argv)
{
    firn *mount;

    HOLDS(argc > 2);
    MUST(firn_open(argv[2], &mount));
    if (strcmp(argv[1], "drain") == 0 && argc > 3)
        drain(mount, argv[2], strtoull(argv[3], NULL, 10));
    else if (strcmp(argv[1], "late") == 0)
        late(mount, argv[2]);
    else if (strcmp(argv[1], "room") == 0)
        room(mount, argv[2]);
    else if (strcmp(argv[1], "steps") == 0 && argc > 4)
        steps(argv[3], strtoull(argv[4], NULL, 10));
    else if (strcmp(argv[1], "older") == 0)
        older(mount);
    else
        return 1;
    firn_close(mount);
    return 0;
}
