//! `libfirn_preload.so`: lets unmodified programs write and read files of a Firn mount in its shared memory (the
//! arena), at memory speed.
//!
//! `LD_PRELOAD=libfirn_preload.so PROGRAM` puts the functions of module `hook` before those of the C library. They act
//! on descriptors of files on a Firn mount, and on *stubs*: empty files on tmpfs with their bytes in firnd (the process
//! that serves the mount). For all other descriptors a hook costs a load and a branch. An unusual call goes to the
//! kernel, and so through the mount: it is slower but equally correct.
//!
//! | modules | job |
//! |---|---|
//! | `hook`, `real` | the exported functions, and those of the C library behind them |
//! | `table`, `lock`, `wiped` | what the library knows of each descriptor |
//! | `descriptor`, `lease`, `list`, `offset`, `memory` | direct writes and reads of one descriptor |
//! | `kernel`, `stub` | what serves the other calls of a descriptor: the kernel, or firnd for a stub |
//! | `connect`, `devices`, `trees`, `request_policy` | firnd: connections, mounts, trees of stubs, when to ask it |
//! | `share`, `sharing`, `vfork` | descriptors that other processes get |
//!
//! Promises
//! * A program behaves as without the library, whether firnd runs or not.
//! * Hooks do not allocate and do not unwind, and keep errno when they succeed. They may run in signal handlers, in
//!   children of vfork(2), and before `start` has run.
//! * A child of fork(2) uses no state of its parent, because it finds that state as zeros (`table`).
//!
//! This library relies on the following:
//! * The C library is that of GNU. In a process with another one (musl) this library forwards each call and does
//!   nothing else (`c_library`).
//! * A descriptor with direct access belongs to this process alone. Before a call that could share it (dup, fork, exec,
//!   SCM_RIGHTS, mmap, …) its offset is given back to the kernel (`share`).
//! * Raw system calls are not seen. A program may close a descriptor by a raw call (`kernel`). It may not move the
//!   offset of one descriptor both by raw calls and by the C library.
//!
//! A small file goes through the kernel only, because the request for direct access would cost more than it saves
//! (`request_policy`).
//!
//! `FIRN_PRELOAD=off` turns the library off. `FIRN_PRELOAD_REPORT=1` prints at exit how many calls used direct access.

mod c_library;
mod connect;
mod cookie;
mod descriptor;
mod devices;
mod fallback;
mod hook;
mod kernel;
mod lease;
mod list;
mod lock;
mod mapping;
mod memory;
mod offset;
mod opened;
mod outcome;
mod probe;
mod real;
mod report;
mod request_policy;
mod share;
mod sharing;
mod start;
mod stub;
mod summary;
mod sys;
mod table;
mod trees;
mod vfork;
mod wiped;
