/*
 * firn.h - the C interface of Firn, a file system for checkpoints.
 *
 * What it is for:
 *
 * Chunk lists: a program on the host reads files of a mount directly from the mount's memory, without a
 * copy and without the file system. Examples are an RDMA agent that registers the memory and sends the
 * addresses to another host, and a tool that moves a checkpoint elsewhere. The promises are in
 * docs/SEMANTICS.md, "Chunk lists".
 *
 *     firn *mount;
 *     struct firn_data_region region = {.size = sizeof region};
 *     firn_chunk_list *list;
 *
 *     firn_open("/ckpt", &mount);
 *     firn_map_region(mount, &region);              once: register region.address with the network
 *     firn_get_chunk_meta_list(mount, "/ckpt/step_100/rank0", &list);
 *     ... read the pieces, for any time ...
 *     firn_chunk_list_check(list, &changed);        0: the bytes that were read are the file's bytes
 *     firn_chunk_list_free(list);
 *     firn_close(mount);
 *
 * Transactions: all changes since the last checkpoint take effect at once or not at all, together with the
 * checkpoint of the job's memory. The job itself, or the program that checkpoints it, makes these calls.
 * See docs/SEMANTICS.md, "Transactions".
 *
 *     firn_begin(mount, "/ckpt");
 *     ... the job writes, renames, removes ...
 *     firn_prepare(mount, "/ckpt", 17);             durable, undecided
 *     ... checkpoint 17 of the memory is taken ...
 *     firn_commit(mount, "/ckpt", 17, FIRN_BEGIN_NEXT, NULL);
 *
 *     firn_restore(mount, "/ckpt", 17);             before a restart from checkpoint 17
 *
 * State: how many bytes are not in the backing yet, and waits until they are.
 *
 *     struct firn_status status = {.size = sizeof status};
 *
 *     firn_status(mount, &status);                  status.held_bytes
 *     firn_drain(mount, "/ckpt/step_100");          begins, and returns at once
 *     firn_wait(mount, "/ckpt/step_100", FIRN_DURABLE, FIRN_FOREVER);
 *
 * Checkpoints: which checkpoints of a directory are whole, and where their bytes are, as in `firn history`.
 *
 *     firn_list_checkpoints("/ckpt", &checkpoints);
 *     ... firn_checkpoint_list_items(checkpoints)[0] is the newest ...
 *     firn_checkpoint_list_free(checkpoints);
 *
 * Structures with a field `size` may get more fields in later versions. Before each call that fills such a
 * structure, the program sets `size` to the sizeof with which it was compiled. A newer library does not write
 * fields that an older program's structure lacks. An older library sets fields that it does not know to zero.
 * EINVAL: `size` is not set.
 *
 * Units: sizes, lengths and offsets are bytes. Strings end with a zero byte; paths may have any other bytes.
 *
 * Errors: functions that can fail return 0 or a positive errno. firn_strerror() returns what the errno means here
 * and what to do; firn_error_message() returns what happened in this call. A function stores results through
 * pointers only if it returns 0.
 *
 *     ENODEV      the path is not on a Firn mount
 *     ENOTCONN    the mount is dead, because firnd was killed: mount again, then call firn_open() again
 *     ETIMEDOUT   firnd does not answer (it is stopped, or its host overloaded); firn_wait(): `timeout_ms` is over
 *     EACCES      the mount belongs to another user
 *     EPROTO      firnd and this library have different versions
 *     EAGAIN      all connections to this firnd are in use by other handles, with requests or lists
 *     ESTALE      the list is no longer valid: make a new one
 *     ENOENT      no such file, or no transaction there
 *     EISDIR      the path is a directory
 *     EXDEV       the path is on another mount than the handle
 *     EOPNOTSUPP  the mount has no transactions: mount it with drain=commit; or mode=shadow cannot work there
 *     ENOTDIR     the path is not a directory, and a transaction covers a directory
 *     EBUSY       another transaction is open at, above or below the path
 *     EINVAL      a null pointer, a range outside the piece, not a regular file, or not the transaction's number
 *     ENODATA     the bytes are in the backing only: read them through the mount; or the path has no file
 *     EIO         a spill file or the backing fails
 *     EMFILE      the handle has 1024 lists already
 *     ENOTRECOVERABLE  a fault in this library: please report it
 *
 * Threads: several threads may use a handle and its lists at the same time. Requests of one handle are made one
 * after the other, so a request waits for a commit or a firn_wait() of another thread. A thread that must not
 * wait uses a separate handle. During firn_close() no other thread may use the handle, and during
 * firn_chunk_list_free() no other thread may use the list. Each thread has its own firn_error_message().
 *
 * Processes: a handle belongs to the process that opened it. A child of fork() must not use it, and should
 * exec or exit: while the child keeps the descriptors open, lists that were not freed keep their memory in use.
 * Descriptors are closed at exec.
 *
 * Permission: only the user that mounted, and root, may use a mount through this library.
 */
#ifndef FIRN_H
#define FIRN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the library ---------------------------------------------------------------------------------- */

/* Version of the library, such as "0.1.0". */
const char *firn_version(void);

/* Returns what an errno of this library means and what to do. Never NULL; the string is never freed. */
const char *firn_strerror(int error);

/* Returns what went wrong in the last failed call of this thread. Never NULL; empty if no call has failed. The
 * string is valid until the thread's next failed call. */
const char *firn_error_message(void);

/* ---- a mount -------------------------------------------------------------------------------------- */

/* A connection to the firnd of one mount. */
typedef struct firn firn;

/* Connects to the mount of `path`: the mount point, a path below it, or a path in its backing.
 * ENODEV, ENOTCONN, ETIMEDOUT, EACCES, EPROTO, EAGAIN. */
int firn_open(const char *path, firn **handle);

/* Ends the connection. Its lists are then no longer valid, and addresses in its region must no longer be read. Lists
 * must still be freed; the region is unmapped when the last list is freed. NULL is allowed. */
void firn_close(firn *handle);

/* ---- state and drain ------------------------------------------------------------------------------ */

/* The state of a mount. The program sets `size`, the library fills the other fields. */
struct firn_status {
    size_t size;                /* sizeof(struct firn_status), set by the program */
    uint64_t held_bytes;        /* bytes that programs wrote and that are not in the backing yet */
    uint64_t held_files;        /* number of files with held bytes */
    uint64_t oldest_held_ms;    /* age of the oldest held byte in milliseconds; 0: no byte is held */
    uint64_t arena_bytes;       /* size of the memory that the mount may use */
    uint64_t arena_used_bytes;  /* size of the part of this memory that is in use */
    uint64_t spill_bytes;       /* size of the spill file; 0: there is no spill file */
    uint64_t spill_used_bytes;  /* size of the part of the spill file that is in use */
    uint64_t drained_bytes;     /* bytes written to the backing since firnd attached */
    uint64_t drain_errors;      /* number of writes to the backing that failed since firnd attached */
    uint64_t recorded_errors;   /* number of errors until `firn status --clear-errors`; `firn status` lists them */
    uint64_t waiting_writers;   /* number of writers that wait for room in memory */
    uint64_t open_files;        /* number of files that are open through the mount */
    uint64_t pid;               /* process id of firnd */
};

/* Stores the state of the mount in `status`. */
int firn_status(firn *handle, struct firn_status *status);

/* What the bytes of a file survive. */
enum firn_durability {
    FIRN_HELD = 0,      /* in memory of this host: survives the death of every process */
    FIRN_SPILLED = 1,   /* in the spill file of this host: survives the death of every process */
    FIRN_PARTNERED = 2, /* held, and copied to the memory of a partner host: survives the loss of one host */
    FIRN_LOGGED = 3,    /* in the backing, in the file or, with layout=log, in a log: other hosts see the bytes through
                         * their mounts */
    FIRN_DRAINED = 4,   /* in the file in the backing, as after write(2): other hosts see the bytes */
    FIRN_DURABLE = 5    /* in the file in the backing, as after fsync(2): survives a crash of the host */
};

/* For firn_wait(): no time limit. */
#define FIRN_FOREVER UINT64_MAX

/* Begins to drain the files at or below `path`, and returns at once. ENOENT, EXDEV. */
int firn_drain(firn *handle, const char *path);

/* Drains the files at or below `path`, and waits until all bytes that were written to them before the call have the
 * level `until`: FIRN_LOGGED, FIRN_DRAINED or FIRN_DURABLE. With FIRN_PARTNERED, drains nothing and waits for the
 * partner, which copies closed files; EOPNOTSUPP: the mount has no partner. ETIMEDOUT: the level was not reached within
 * `timeout_ms` milliseconds; the drain or the copy continues. EBUSY: a file is FIRN_LOGGED, and cannot reach a higher
 * level before all its writers have closed it. Other errors are of the backing (EIO, ENOSPC, ...): the data is kept. */
int firn_wait(firn *handle, const char *path, enum firn_durability until, uint64_t timeout_ms);

/* Stores the lowest level of the files at or below `path`: the caller's files, and files of other users that firnd knows.
 * A file that an earlier mount made durable counts as FIRN_DRAINED until firn_wait() is called for it again. ENOENT,
 * EXDEV. ENODATA: there is no file. */
int firn_get_durability(firn *handle, const char *path, enum firn_durability *level);

/* Room of a mount for the next writes. The program sets `size`, the library fills the other fields. */
struct firn_room {
    size_t size;            /* sizeof(struct firn_room), set by the program */
    uint64_t memory_bytes;  /* bytes of memory that are free, or have drained data that can be evicted */
    uint64_t spill_bytes;   /* free bytes of the spill file; 0 also if there is no spill file */
    uint64_t backing_bytes; /* bytes available to this user in the backing, less the room that held data will need */
};

/* Stores how many bytes can be written before writers wait or the backing is full. Other programs may use this room
 * meanwhile. */
int firn_get_room(firn *handle, struct firn_room *room);

/* ---- checkpoints ---------------------------------------------------------------------------------- */

/* Whether a checkpoint can be used. */
enum firn_wholeness {
    FIRN_WHOLE = 0,          /* it has files, and no other state applies */
    FIRN_WRITTEN = 1,        /* a program has a file of it open for writing */
    FIRN_CUT = 2,            /* the writer of a file, or firnd, was killed before the file was closed */
    FIRN_IN_TRANSACTION = 3, /* an unfinished transaction may have changed it */
    FIRN_EMPTY = 4,          /* there is no file in it */
    FIRN_UNKNOWN = 5,        /* the directory is not on a mount, so there is no firnd to ask */
    FIRN_UNREADABLE = 6      /* it cannot be examined; `bytes` and `files` are 0 */
};

/* firn_checkpoint.level of a checkpoint without files. */
#define FIRN_NO_LEVEL UINT32_MAX

/* A checkpoint: a directory or file with a step in its name (see `firn history --help`). */
struct firn_checkpoint {
    const char *name;     /* name in the directory */
    uint64_t step;        /* step in the name */
    uint64_t bytes;       /* size of all its files together */
    uint64_t files;       /* number of its files */
    int64_t modified_s;   /* newest modification time of all objects in it, in seconds since 1970 ... */
    uint32_t modified_ns; /* ... and nanoseconds */
    uint32_t state;       /* enum firn_wholeness */
    uint32_t level;       /* enum firn_durability: lowest level of its files, or FIRN_NO_LEVEL */
    uint32_t directory;   /* 1: it is a directory; 0: it is a file */
    uint64_t reserved[2]; /* 0 */
};

/* Checkpoints of a directory. */
typedef struct firn_checkpoint_list firn_checkpoint_list;

/* Lists the caller's checkpoints directly in `directory`, the last modified first. If the directory is not on a mount,
 * their state is FIRN_UNKNOWN. ENOENT, ENOTDIR. ENOTCONN: the mount of the directory is dead; or the directory is in a
 * backing that is not mounted, and data of an earlier mount is still in memory. Mount the backing again. */
int firn_list_checkpoints(const char *directory, firn_checkpoint_list **list);

/* Returns the number of checkpoints. */
size_t firn_checkpoint_list_count(const firn_checkpoint_list *list);

/* Returns the checkpoints. They are valid as long as the list. */
const struct firn_checkpoint *firn_checkpoint_list_items(const firn_checkpoint_list *list);

/* Frees the list. NULL is allowed. */
void firn_checkpoint_list_free(firn_checkpoint_list *list);

/* ---- the data region ------------------------------------------------------------------------------ */

/* Where a mount keeps held data. The program sets `size`, the library fills the other fields. The strings are valid
 * as long as the handle. */
struct firn_data_region {
    size_t size;               /* sizeof(struct firn_data_region), set by the program */
    const void *address;       /* address of the region in this process; NULL before firn_map_region() */
    uint64_t bytes;            /* size of the region */
    uint64_t page_bytes;       /* size of a page, the unit of allocation and of alignment */
    uint64_t chunk_bytes;      /* size of a chunk, the unit that moves to the spill file */
    const char *path;          /* path of the arena, the file with the region ... */
    uint64_t offset;           /* ... which begins at this offset of the file */
    const void *spill_address; /* address of the mapped spill file in this process; NULL if it is not mapped */
    uint64_t spill_bytes;      /* size of the whole spill file; 0: there is no spill file */
    const char *spill_path;    /* path of the spill file; NULL: there is no spill file */
};

/* Stores the location of the region in `region`. EINVAL. */
int firn_get_data_region(firn *handle, struct firn_data_region *region);

/* Maps the region, and the spill file if there is one, for reading, and stores their location. A second call returns
 * the same mapping; firn_close() ends it. Bytes outside the pieces of a held list may change at any time and have no
 * meaning. A load from `spill_address` raises SIGBUS if the device fails, where firn_read_chunk() returns EIO.
 * ESTALE: the files do not belong to this mount. */
int firn_map_region(firn *handle, struct firn_data_region *region);

/* ---- chunk lists ---------------------------------------------------------------------------------- */

/* Where a part of a file is. */
enum firn_place {
    FIRN_IN_MEMORY = 0,  /* in the region */
    FIRN_IN_SPILL = 1,   /* in the spill file */
    FIRN_IN_BACKING = 2, /* in the backing only: read it through the mount */
    FIRN_IN_HOLE = 3,    /* never written: zeros */
    FIRN_IN_MEMORY_FILE = 4 /* in a memory file, whose number is firn_chunk_meta.chunk: copy it with firn_read_chunk() */
};

/* firn_chunk_meta.chunk of a part that is not in a chunk. */
#define FIRN_NO_CHUNK UINT32_MAX

/* A part of a file. */
struct firn_chunk_meta {
    uint64_t offset;     /* offset of the part in the file */
    uint64_t bytes;      /* length of the part, more than 0 */
    uint64_t at;         /* offset of the bytes in the region (FIRN_IN_MEMORY), the spill file (FIRN_IN_SPILL), the file in
                          * the backing (FIRN_IN_BACKING) or the memory file (FIRN_IN_MEMORY_FILE); a hole: 0 */
    const void *address; /* address of the bytes in this process, if they are in memory or in the spill file and the
                          * region was mapped before the list was made; else NULL */
    uint32_t place;      /* enum firn_place */
    uint32_t chunk;      /* index of the chunk, or FIRN_NO_CHUNK */
    uint64_t reserved[2]; /* 0 */
};

/* A list of where all bytes of a file are. As long as it is held, these bytes remain there. */
typedef struct firn_chunk_list firn_chunk_list;

/* Makes the list of the file at `path`. It is held until firn_chunk_list_free(), firn_close(), or the end of this
 * process or of firnd. Meanwhile the pieces in memory and in the spill file remain in place and unchanged, even if
 * programs change the file. Their memory cannot be used for other data, so free lists early. ENOENT, EISDIR, EINVAL,
 * EXDEV, EMFILE, EIO, ENOTCONN, ETIMEDOUT. */
int firn_get_chunk_meta_list(firn *handle, const char *path, firn_chunk_list **list);

/* Returns the size of the file when the list was made. */
uint64_t firn_chunk_list_bytes(const firn_chunk_list *list);

/* Returns the number of pieces. 0: the file is empty. */
size_t firn_chunk_list_count(const firn_chunk_list *list);

/* Returns the pieces, sorted by offset, without gap or overlap. They are valid as long as the list. */
const struct firn_chunk_meta *firn_chunk_list_pieces(const firn_chunk_list *list);

/* Checks whether the bytes that were read until now are valid. 0: the list was held until now. If `changed` is not NULL,
 * it is then set to 1 if the file was changed, or may have been changed, through the mount since the list was made,
 * else to 0. Bytes that were read from memory and the spill file are always those of the time of the list; bytes read
 * from the backing may be newer if `changed` is 1. ESTALE: the list may have ended earlier; read again with a new
 * list. */
int firn_chunk_list_check(firn_chunk_list *list, int *changed);

/* Releases the pieces and frees the list. NULL is allowed. */
void firn_chunk_list_free(firn_chunk_list *list);

/* Copies `bytes` bytes of a piece to `buffer`, beginning `from` bytes after the start of the piece. Pieces in memory or
 * in the spill file need firn_map_region() first. EINVAL, ENODATA, EIO. */
int firn_read_chunk(firn *handle, const struct firn_chunk_meta *piece, uint64_t from, void *buffer,
                    size_t bytes);

/* ---- transactions --------------------------------------------------------------------------------- */

/* A transaction covers a directory of the mount and all below it. `path` names that directory: the mount point or a
 * directory below it. Each user that may use the mount through this library may commit the transaction.
 *
 * A transaction belongs to the handle that began it. If that handle is closed, or its process ends, before the
 * transaction is prepared, the transaction is aborted at once. A later prepare or commit of it returns ECANCELED.
 *
 * All functions below can return EOPNOTSUPP, ENOENT, EINVAL, EXDEV, ENODEV and ENOTCONN. Errors that are neither in this
 * list nor named at a function are errors of the backing (EIO, ENOSPC, ...). The transaction then remains open, and the
 * call can be repeated. If the backing fails with an errno that has a meaning under "Errors" above, EIO is returned
 * instead, and firn_error_message() has the backing's error.
 *
 * If the connection ends in the middle of a commit (ENOTCONN), its outcome is unknown. Call firn_restore() after the
 * next mount to find out. */

/* For firn_commit(): the number with which the transaction was prepared, or else the last commit's number plus one. */
#define FIRN_NEXT_ID UINT64_MAX

/* For firn_commit(): begin the next transaction before any program can change the directory. */
#define FIRN_BEGIN_NEXT 1u

/* For firn_commit(): return once the outcome is decided and durable. From then on programs see the tree as after the
 * commit, and firnd applies it in the background. Until it is applied, changes of names and attributes at or below `path`
 * wait, and so do the next firn_prepare() and firn_commit(). Reads and writes of files do not wait, nor, with
 * FIRN_BEGIN_NEXT, does the begin of the next transaction. */
#define FIRN_COMMIT_ASYNC 2u

/* Begins a transaction. From now on the backing does not show changes at or below `path`; programs on the mount see
 * them at once. ENOENT: there is no such directory. ENOTDIR. EBUSY: a transaction is open at, above or below `path`. */
int firn_begin(firn *handle, const char *path);

/* Begins a transaction in a directory that does not exist yet. The directory is made as a part of the transaction, with
 * the permission bits `mode` less those of the umask, as by mkdir(2). Programs see it at once, the backing gets it at the
 * commit, and firn_abort() removes it. EEXIST: it exists already. ENOENT, ENOTDIR: its parent is missing, or is not a
 * directory. EACCES: the caller may not write to the parent. EBUSY: the parent is in a transaction, or another transaction
 * has the name. EOPNOTSUPP: the mount has `participants`. */
int firn_begin_create(firn *handle, const char *path, unsigned mode);

/* Makes the transaction durable under the number `id`, and leaves its outcome open, even if firnd or the host dies. A
 * later commit cannot fail for lack of space. Changes at or below `path`, by any process, wait for the decision, so the
 * caller must not make changes meanwhile. A second call with the same number does nothing. ENOENT: no transaction is
 * open. EINVAL: the transaction is prepared with another number. */
int firn_prepare(firn *handle, const char *path, uint64_t id);

/* Commits the transaction: all its changes take effect durably. Prepares it first if it is not prepared. `id` is its
 * number, or FIRN_NEXT_ID. `flags` is 0, FIRN_BEGIN_NEXT, FIRN_COMMIT_ASYNC or both. Stores the number in `committed`, if
 * that is not NULL. ENOENT: no transaction is open. EINVAL: the transaction is prepared with another number, or a flag is
 * unknown. */
int firn_commit(firn *handle, const char *path, uint64_t id, unsigned flags, uint64_t *committed);

/* Undoes all changes of the transaction: everything is as it was at firn_begin(). Calls on open files that did not exist
 * then fail with ESTALE. ENOENT: no transaction is open. EBUSY: the transaction is committed and not fully applied. */
int firn_abort(firn *handle, const char *path);

/* Restores the files of checkpoint `id`: commits the transaction that was prepared with this number, or undoes all
 * changes after the commit with this number. EINVAL: the files of that checkpoint are no longer available. */
int firn_restore(firn *handle, const char *path, uint64_t id);

#ifdef __cplusplus
}
#endif

#endif
