//! `libfirn_preload.so`: writes and reads of unmodified programs go to the arena at memory speed.
//!
//! `LD_PRELOAD=libfirn_preload.so PROGRAM` puts the functions of `hook` before those of the C library.
//! They act on descriptors that are the kernel's own and lie on a Firn mount; on all others they cost a
//! load and a branch. What is unusual goes to the kernel, and so to the mount: slow, never wrong.
//!
//! Promises
//! * A program behaves as without the library, where firnd runs and where it does not.
//! * Hooks neither allocate nor unwind, keep errno where they succeed, and may run in signal handlers, in
//!   children of vfork(2) and before `start` ran.
//! * A child of fork(2) uses nothing of its parent's: what the library keeps is zeros there (`table`).
//!
//! What it relies on
//! * The GNU C library. In a process of another one (musl) it is loaded, forwards every call and does nothing
//!   (`c_library`).
//! * A descriptor with direct access is this process's alone. Whatever could share it (dup,
//!   fork, exec, SCM_RIGHTS, mmap, …) gives its offset back to the kernel first (`share`).
//! * Raw system calls are not seen. A descriptor that a program uses by the C library *and* by raw calls
//!   that move its offset is not supported; one that was closed by a raw call is (`kernel`).
//!
//! A file that is opened, moves a few KiB and is closed goes through the kernel (`patience`): a grant would cost more.
//!
//! `FIRN_PRELOAD=off` turns it off; `FIRN_PRELOAD_REPORT=1` prints at exit what went which way.

mod c_library;
mod connect;
mod cookie;
mod descriptor;
mod devices;
mod fallback;
mod handled;
mod hook;
mod kernel;
mod lease;
mod list;
mod lock;
mod mapping;
mod memory;
mod offset;
mod opened;
mod patience;
mod probe;
mod real;
mod report;
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
