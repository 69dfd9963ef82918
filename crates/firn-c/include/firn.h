/*
 * firn.h - the C interface of Firn, a file system for checkpoints.
 *
 * What it is for:
 *
 * Chunk lists: a program on the host reads files of a mount out of the mount's own memory, without a
 * copy and without the file system in between: an RDMA agent that registers the memory and tells another
 * host the addresses, a tool that moves a checkpoint elsewhere. docs/SEMANTICS.md, "Chunk lists", says what
 * is promised.
 *
 *     firn *mount;
 *     struct firn_data_region region = {.size = sizeof region};
 *     firn_chunk_list *list;
 *
 *     firn_open("/ckpt", &mount);
 *     firn_map_region(mount, &region);              once: register region.address with the network
 *     firn_get_chunk_meta_list(mount, "/ckpt/step_100/rank0", &list);
 *     ... read the pieces, as long as one likes ...
 *     firn_chunk_list_check(list, &changed);        0: all that was read is what the file held
 *     firn_chunk_list_free(list);
 *     firn_close(mount);
 *
 * Transactions: a job, or who checkpoints it, makes all changes since the last checkpoint count at once or
 * not at all, together with the checkpoint of the job's memory. docs/SEMANTICS.md, "Transactions".
 *
 *     firn_begin(mount, "/ckpt");
 *     ... the job writes, renames, removes ...
 *     firn_prepare(mount, "/ckpt", 17);             durable, undecided
 *     ... checkpoint 17 of the memory is taken ...
 *     firn_commit(mount, "/ckpt", 17, FIRN_BEGIN_NEXT, NULL);
 *
 *     firn_restore(mount, "/ckpt", 17);             before a restart from checkpoint 17
 *
 * State: how much is not in the backing yet, and waiting until it is.
 *
 *     struct firn_status status = {.size = sizeof status};
 *
 *     firn_status(mount, &status);                  status.held_bytes
 *     firn_drain(mount, "/ckpt/step_100");          begins, and returns at once
 *     firn_wait(mount, "/ckpt/step_100", FIRN_DURABLE, FIRN_FOREVER);
 *
 * Checkpoints: which of a directory are whole, and where their bytes are, as `firn history` lists them.
 *
 *     firn_list_checkpoints("/ckpt", &checkpoints);
 *     ... firn_checkpoint_list_items(checkpoints)[0] is the newest ...
 *     firn_checkpoint_list_free(checkpoints);
 *
 * Structures with a field `size` grow: a program sets it to the sizeof that it was compiled with before each
 * call that fills the structure. A newer library does not write what an older program has no room for, and an
 * older library zeroes what it does not know. EINVAL: `size` is not set.
 *
 * Units: sizes, lengths and offsets are bytes. Strings end with a zero byte; paths are any bytes.
 *
 * Errors: functions that can fail return 0 or a positive errno. firn_strerror() says what it means here and
 * what to do, firn_error_message() more exactly what happened. What a function gives through a pointer is
 * given only where it returns 0.
 *
 *     ENODEV      the path is on no Firn mount
 *     ENOTCONN    the mount is dead: firnd was killed; mount again, then firn_open() again
 *     ETIMEDOUT   firnd does not answer (stopped, or its machine overloaded); firn_wait(): not reached in time
 *     EACCES      the mount belongs to another user
 *     EPROTO      firnd and this library are of different versions
 *     EAGAIN      all connections to this firnd are in use by others, with requests or lists
 *     ESTALE      the list does not hold any more: make another one
 *     ENOENT, EISDIR, EXDEV
 *                 no such file, or no transaction there; a directory; on another mount than the handle
 *     EOPNOTSUPP  the mount has no transactions: mount it with drain=commit; or mode=shadow cannot work there
 *     ENOTDIR, EBUSY
 *                 a transaction covers a directory; another transaction is in the way
 *     EINVAL      a null pointer, a range outside the piece, not a regular file, another number
 *     ENODATA     the bytes are in the backing only: read them through the mount; or there is no file there
 *     EIO         a spill file or the backing fails
 *     EMFILE      the handle holds 1024 lists already
 *     ENOTRECOVERABLE  a fault in this library: please report it
 *
 * Threads: several threads may use a handle and its lists at once; their requests take turns, also behind
 * a commit or a firn_wait(): whoever must not wait for one uses a handle of its own. Only
 * firn_close() needs the handle alone, and firn_chunk_list_free() its list. firn_error_message() is
 * the thread's own.
 *
 * Processes: a handle belongs to the process that opened it. A child of fork() must not use it, and should
 * exec or exit: as long as it keeps the descriptors open, lists that were not freed go on holding memory.
 * Descriptors are closed at exec.
 *
 * Who may: the user who mounted, and root.
 */
#ifndef FIRN_H
#define FIRN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the library ---------------------------------------------------------------------------------- */

/* Version of the library, as "0.1.0". */
const char *firn_version(void);

/* What an error of this library means and what to do. Never NULL; lives for ever. */
const char *firn_strerror(int error);

/* What the last call of this thread that failed met. Never NULL, empty where none failed; valid until the
 * thread's next call that fails. */
const char *firn_error_message(void);

/* ---- a mount -------------------------------------------------------------------------------------- */

/* A connection to the firnd of one mount. */
typedef struct firn firn;

/* Connects to the mount that `path` is on: the mount point, anything below it, or anything in its backing.
 * ENODEV, ENOTCONN, ETIMEDOUT, EACCES, EPROTO, EAGAIN. */
int firn_open(const char *path, firn **handle);

/* Ends the connection: its lists hold no more, and addresses in its region must not be read any more. Lists
 * must still be freed; with the last of them the region is unmapped. NULL is allowed. */
void firn_close(firn *handle);

/* ---- state and drain ------------------------------------------------------------------------------ */

/* The state of a mount. The program sets `size`, the library fills the rest. */
struct firn_status {
    size_t size;                /* sizeof(struct firn_status), set by the program */
    uint64_t held_bytes;        /* written by programs, and not in the backing yet ... */
    uint64_t held_files;        /* ... of so many files ... */
    uint64_t oldest_held_ms;    /* ... for so many milliseconds at most; 0: nothing is held */
    uint64_t arena_bytes;       /* of memory that the mount may use */
    uint64_t arena_used_bytes;
    uint64_t spill_bytes;       /* that the spill file may hold; 0: there is none */
    uint64_t spill_used_bytes;
    uint64_t drained_bytes;     /* written to the backing since firnd attached */
    uint64_t drain_errors;      /* writes to the backing that failed since then */
    uint64_t recorded_errors;   /* that nobody has dealt with yet: `firn status` names them */
    uint64_t waiting_writers;   /* that wait for room in memory */
    uint64_t open_files;        /* through the mount */
    uint64_t pid;               /* of firnd */
};

/* Tells the state of the mount. */
int firn_status(firn *handle, struct firn_status *status);

/* What the bytes of a file survive. */
enum firn_durability {
    FIRN_HELD = 0,      /* in memory of this host: outlives every process */
    FIRN_SPILLED = 1,   /* the same, in the spill file */
    FIRN_PARTNERED = 2, /* held, and copied into the memory of a partner host: outlives the loss of one host */
    FIRN_LOGGED = 3,    /* in the backing, in its place or, with layout=log, in a log: other hosts see it through
                         * their mounts */
    FIRN_DRAINED = 4,   /* in the backing, as after write(2): seen by other hosts */
    FIRN_DURABLE = 5    /* in the backing, as after fsync(2): outlives the host */
};

/* For firn_wait(): as long as it takes. */
#define FIRN_FOREVER UINT64_MAX

/* Begins to drain the files at or below `path`, and returns at once. ENOENT, EXDEV. */
int firn_drain(firn *handle, const char *path);

/* Drains the files at or below `path` and waits until all that was written to them before the call is
 * FIRN_LOGGED, FIRN_DRAINED or FIRN_DURABLE. With FIRN_PARTNERED it drains nothing and waits for the partner, which
 * copies files that are closed; EOPNOTSUPP: the mount has no partner. ETIMEDOUT: not within `timeout_ms`
 * milliseconds; the drain, or the copy, goes on. EBUSY: it is FIRN_LOGGED, and not more before everybody who writes
 * to it has closed it. Other errors are the backing's (EIO, ENOSPC, ...): the data is kept. */
int firn_wait(firn *handle, const char *path, enum firn_durability until, uint64_t timeout_ms);

/* Tells the lowest level of the files at or below `path`: those of the caller, and others of which firnd knows. What
 * earlier mounts made durable counts as FIRN_DRAINED until it is waited for again. ENOENT, EXDEV. ENODATA: there is no
 * file. */
int firn_get_durability(firn *handle, const char *path, enum firn_durability *level);

/* Room of a mount for what is written next. The program sets `size`, the library fills the rest. */
struct firn_room {
    size_t size;            /* sizeof(struct firn_room), set by the program */
    uint64_t memory_bytes;  /* free in memory, or taken by drained data that makes way */
    uint64_t spill_bytes;   /* free in the spill file; 0 also where there is none */
    uint64_t backing_bytes; /* available to this user in the backing, less what held data will take */
};

/* Tells how many bytes can be written before writers wait, or the backing is full. Others may take them meanwhile. */
int firn_get_room(firn *handle, struct firn_room *room);

/* ---- checkpoints ---------------------------------------------------------------------------------- */

/* Whether a checkpoint can be used. */
enum firn_wholeness {
    FIRN_WHOLE = 0,          /* it has files, and nothing is known against it */
    FIRN_WRITTEN = 1,        /* a program has a file of it open for writing */
    FIRN_CUT = 2,            /* the writer of a file, or firnd, was killed before the file was closed */
    FIRN_IN_TRANSACTION = 3, /* a transaction that is not over may have changed it */
    FIRN_EMPTY = 4,          /* there is no file in it */
    FIRN_UNKNOWN = 5,        /* the directory is not on a mount: nobody knows */
    FIRN_UNREADABLE = 6      /* it cannot be looked at; bytes and files are 0 */
};

/* firn_checkpoint.level of a checkpoint without files. */
#define FIRN_NO_LEVEL UINT32_MAX

/* A checkpoint: a directory or file with a step in its name, as `firn history --help` says. */
struct firn_checkpoint {
    const char *name;     /* in its directory */
    uint64_t step;        /* from the name */
    uint64_t bytes;       /* of its files */
    uint64_t files;       /* their number */
    int64_t modified_s;   /* last modification of anything in it, in seconds since 1970 ... */
    uint32_t modified_ns; /* ... and nanoseconds */
    uint32_t state;       /* enum firn_wholeness */
    uint32_t level;       /* enum firn_durability: the lowest of its files, or FIRN_NO_LEVEL */
    uint32_t directory;   /* 1: a directory; 0: a file */
    uint64_t reserved[2]; /* 0 */
};

/* Checkpoints of a directory. */
typedef struct firn_checkpoint_list firn_checkpoint_list;

/* Lists the caller's checkpoints directly in `directory`, the one modified last first. The directory may be on a mount,
 * and need not be: then their state is FIRN_UNKNOWN. ENOENT, ENOTDIR. ENOTCONN: it is on a mount that is dead, or in a
 * backing that is not mounted while the memory of an earlier mount has data that the backing lacks: mount it again. */
int firn_list_checkpoints(const char *directory, firn_checkpoint_list **list);

/* Number of checkpoints. */
size_t firn_checkpoint_list_count(const firn_checkpoint_list *list);

/* The checkpoints. They live as long as the list. */
const struct firn_checkpoint *firn_checkpoint_list_items(const firn_checkpoint_list *list);

/* Frees the list. NULL is allowed. */
void firn_checkpoint_list_free(firn_checkpoint_list *list);

/* ---- the data region ------------------------------------------------------------------------------ */

/* Where a mount keeps what it holds. The program sets `size`, the library fills the rest; the strings live as
 * long as the handle. */
struct firn_data_region {
    size_t size;               /* sizeof(struct firn_data_region), set by the program */
    const void *address;       /* of the region in this process; NULL until firn_map_region() */
    uint64_t bytes;            /* of the region */
    uint64_t page_bytes;       /* unit of allocation and of alignment */
    uint64_t chunk_bytes;      /* of a chunk, the unit that moves to the spill file */
    const char *path;          /* of the arena, the file that is the region ... */
    uint64_t offset;           /* ... from this offset on */
    const void *spill_address; /* of the start of the spill file in this process; else NULL */
    uint64_t spill_bytes;      /* of the whole spill file; 0: there is none */
    const char *spill_path;    /* of the spill file; NULL: there is none */
};

/* Tells where the region is. EINVAL. */
int firn_get_data_region(firn *handle, struct firn_data_region *region);

/* Maps the region, and the spill file if there is one, for reading, and tells where. A second call gives
 * the same mapping; firn_close() ends it. Bytes outside the pieces of a list that is held change at any
 * time and mean nothing. Reading spill_address raises SIGBUS where the device fails: firn_read_chunk()
 * gives EIO instead. ESTALE: the files are not this mount's. */
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

/* firn_chunk_meta.chunk of what is in no chunk. */
#define FIRN_NO_CHUNK UINT32_MAX

/* A part of a file. */
struct firn_chunk_meta {
    uint64_t offset;     /* from the start of the file */
    uint64_t bytes;      /* more than 0 */
    uint64_t at;         /* in memory: from the start of the region; spilled: from the start of the spill
                          * file; in the backing: from the start of the file; a hole: 0 */
    const void *address; /* in this process, of what is in memory or spilled, where the region was mapped
                          * before the list was made; else NULL */
    uint32_t place;      /* enum firn_place */
    uint32_t chunk;      /* index of the chunk, or FIRN_NO_CHUNK */
    uint64_t reserved[2]; /* 0 */
};

/* Where all bytes of a file are, and the right to find them there. */
typedef struct firn_chunk_list firn_chunk_list;

/* Lists the file at `path`. From now on until firn_chunk_list_free(), firn_close() or the end of this
 * process or of firnd, the pieces in memory and in the spill file stay where they are and keep their bytes,
 * whatever is done to the file: that memory is not free for others meanwhile, so do not keep lists longer
 * than needed. ENOENT, EISDIR, EINVAL, EXDEV, EMFILE, EIO, ENOTCONN, ETIMEDOUT. */
int firn_get_chunk_meta_list(firn *handle, const char *path, firn_chunk_list **list);

/* Bytes of the file when the list was made. */
uint64_t firn_chunk_list_bytes(const firn_chunk_list *list);

/* Number of pieces; 0: the file is empty. */
size_t firn_chunk_list_count(const firn_chunk_list *list);

/* The pieces, sorted by offset, without gap or overlap. They live as long as the list. */
const struct firn_chunk_meta *firn_chunk_list_pieces(const firn_chunk_list *list);

/* Asks whether what was read by the list until now is good. 0: it held until now. Then `changed`, if not
 * NULL, is 1 where the file was changed through the mount since the list was made, or may have been: what
 * was read from memory and the spill file is the file as it was at the list, what was read from the backing
 * may be newer. ESTALE: the list may have ended before that; read again by a new one. */
int firn_chunk_list_check(firn_chunk_list *list, int *changed);

/* Gives the right up and frees the list. NULL is allowed. */
void firn_chunk_list_free(firn_chunk_list *list);

/* Copies `bytes` of a piece, from `from` bytes into it on. Needs firn_map_region() for what is in memory or
 * spilled. EINVAL, ENODATA, EIO. */
int firn_read_chunk(firn *handle, const struct firn_chunk_meta *piece, uint64_t from, void *buffer,
                    size_t bytes);

/* ---- transactions --------------------------------------------------------------------------------- */

/* A transaction covers a directory of the mount and all below it: `path` names that directory, the mount
 * point or one below it. Whoever may use the mount may commit it. It belongs to the handle that began it: when
 * that is closed, or its process ends, before the transaction was prepared, the transaction is aborted at once, and
 * who prepares or commits it then gets ECANCELED. Other errors than those named here are the backing's (EIO, ENOSPC, ...); then the
 * transaction is kept, and the call can be tried again. A number that is named here is never the backing's:
 * where that would be, EIO is given, and firn_error_message() has what the backing said. All of them:
 * EOPNOTSUPP, ENOENT, EINVAL, EXDEV, ENODEV, ENOTCONN. Where the connection ends (ENOTCONN) in the middle of a commit, its outcome is
 * not known: firn_restore() after the next mount tells. */

/* For firn_commit(): the number the transaction was prepared with, or else the last commit's plus one. */
#define FIRN_NEXT_ID UINT64_MAX

/* For firn_commit(): the next transaction is open before anything can change. */
#define FIRN_BEGIN_NEXT 1u

/* For firn_commit(): return once the outcome is decided and durable. Programs see the tree after the commit from
 * then on; firnd carries it out behind them. Until that is done, changes of names and attributes at or below
 * `path` wait, and so do the next firn_prepare() and firn_commit(); reads, writes to files, and with
 * FIRN_BEGIN_NEXT the beginning of the next transaction do not. */
#define FIRN_COMMIT_ASYNC 2u

/* Begins one: from now on the backing shows nothing of what changes at or below `path`, and programs on the
 * mount see their changes at once. ENOENT: no such directory. ENOTDIR. EBUSY: one is open there, above or
 * below. */
int firn_begin(firn *handle, const char *path);

/* The same in a directory that does not exist: it is made as a part of the transaction, with the permission bits `mode`
 * less those of the umask, as mkdir(2) would. Programs see it at once, the backing has it with the commit, and
 * firn_abort() takes it away. EEXIST: it exists. ENOENT, ENOTDIR: no directory to make it in. EACCES: the caller may not.
 * EBUSY: that directory is in a transaction, or the name is another one's. EOPNOTSUPP: with participants. */
int firn_begin_create(firn *handle, const char *path, unsigned mode);

/* Makes it durable under the number `id` and leaves its outcome open, also beyond the death of firnd and of
 * the host. A commit cannot fail for lack of space any more. Changes at or below `path` wait, from whichever
 * process, until it is decided: the caller must not make any. Again with the same number: nothing is done.
 * ENOENT: none is open. EINVAL: prepared with another number. */
int firn_prepare(firn *handle, const char *path, uint64_t id);

/* Makes all of its changes count, durably; prepares it first where nobody did. `id`: its number, or
 * FIRN_NEXT_ID. `flags`: 0, or FIRN_BEGIN_NEXT and FIRN_COMMIT_ASYNC. Gives the number through `committed`, if that is not NULL.
 * ENOENT: none is open. EINVAL: prepared with another number, or a flag that does not exist. */
int firn_commit(firn *handle, const char *path, uint64_t id, unsigned flags, uint64_t *committed);

/* Throws its changes away: all is as it was at firn_begin(), and open files that did not exist then give
 * ESTALE. ENOENT: none is open. EBUSY: it is committed, and not all of it is applied. */
int firn_abort(firn *handle, const char *path);

/* Makes the files those of checkpoint `id`: finishes the transaction that was prepared with this number, or
 * throws away what came after the commit with it. EINVAL: the files of that checkpoint are not kept. */
int firn_restore(firn *handle, const char *path, uint64_t id);

#ifdef __cplusplus
}
#endif

#endif
