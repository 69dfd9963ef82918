//! Stubs: descriptors of empty files on tmpfs, whose bytes firnd has.
//!
//! There is no kernel to leave a call to. What goes neither into a lease nor by a list goes to firnd over the data
//! socket; where firnd is gone, the call waits for the next one, [`WAIT_MS`] at most, and fails with EIO.
//! Nothing is ever written into the stub itself.
//!
//! The stub's offset in the kernel counts while others may share the descriptor: a range of it is reserved by
//! one lseek(2), which is atomic. While nobody does, it is private as with a mount.
//!
//! Every call looks first whether the number still is the file that was opened: no release by the kernel ends
//! the lease of a descriptor that was closed by a raw call.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use firn_direct::connection::{CallError, Payload};
use firn_format::data_socket::{ADOPT_AGAIN, AT_END, DATA_BYTES_MAX, Op, Reply, Request, Status};
use zerocopy::IntoBytes;

use crate::connect;
use crate::descriptor::{self, Claim, Fallback, Handled, Ticket};
use crate::lease::LeaseLost;
use crate::list;
use crate::memory::{CALL_BYTES_MAX, Readable, Run, Source, Target, Writable};
use crate::report::{self, Call, Reason};
use crate::sys::{self, syscall};
use crate::table::{self, Entry, Held, Inner, TABLE, mark_stub, stub_mark, stub_mark_of, tag};

/// How long a call waits for a firnd that was killed to be there again, unless `FIRN_PRELOAD_WAIT` says
/// otherwise (seconds).
const WAIT_MS_DEFAULT: u32 = 10_000;
const PAUSE_MS: u32 = 20;
/// Bytes by requests where there is no connection for leases.
const UNCONNECTED_BYTES: u64 = 128 << 10;
/// A read of so many bytes is worth asking for the list.
const LIST_BYTES_MIN: u64 = 4 << 10;

static WAIT_MS: AtomicU32 = AtomicU32::new(WAIT_MS_DEFAULT);

/// Sets the patience, once, at the start.
pub(crate) fn begin(seconds: Option<&[u8]>) {
    let number = seconds.and_then(|text| std::str::from_utf8(text).ok()?.parse::<u32>().ok());
    if let Some(number) = number {
        WAIT_MS.store(number.saturating_mul(1000), Ordering::Relaxed);
    }
}

/// The part of an entry that only stubs have. All zeros: not told to firnd.
pub(crate) struct StubState {
    /// firnd knows the descriptor by `Inner::token`.
    adopted: bool,
    /// It did once.
    known: bool,
    /// A lease may be asked for or filled.
    granted: bool,
    /// Bytes were written since the last release.
    wrote: bool,
    /// Status flags, and `O_TRUNC` until firnd was told of it.
    flags: c_int,
}

impl StubState {
    pub(crate) const fn new() -> Self {
        Self {
            adopted: false,
            known: false,
            granted: false,
            wrote: false,
            flags: 0,
        }
    }
}

/// How a call finds the descriptor.
enum Entered {
    Held(Held),
    /// This thread was interrupted by a signal while it held the entry.
    Again(&'static Entry),
    /// It is no stub (any more).
    Not,
    /// In a child of vfork(2), which has nothing of its own to keep what a stub needs.
    Vforked,
}

fn enter(fd: c_int) -> Entered {
    if table::in_vfork_child() {
        return Entered::Vforked;
    }
    let Some(mut held) = table::enter_new(fd) else {
        return TABLE.entry(fd).map_or(Entered::Not, Entered::Again);
    };
    let found = sys::identity(fd);
    if held.tag == tag::STUB {
        if found.is_some_and(|(identity, _)| identity == held.identity) {
            return Entered::Held(held);
        }
        // Closed by a raw call: firnd is told, and does not wait for anything.
        let adopted = held.stub.adopted;
        let link = held.link;
        let token = held.token;
        reset(&mut held);
        if adopted {
            connect::ask(link, Op::Release, token, 0);
        }
    }
    // The first use in this process: inherited, or just opened.
    *held = Inner::new();
    match found {
        Some((identity, mode)) if is_regular(mode) && TABLE.trees.is_stub(fd, identity.device) => {
            held.identity = identity;
            held.stub.flags = sys::fcntl(fd, libc::F_GETFL, 0) as c_int;
            if stub_mark_of(fd) == stub_mark::NONE {
                mark_stub(fd, stub_mark::SHARED);
            }
            held.set_tag(tag::STUB);
            Entered::Held(held)
        }
        _ => {
            reset(&mut held);
            Entered::Not
        }
    }
}

fn is_regular(mode: u32) -> bool {
    mode & libc::S_IFMT == libc::S_IFREG
}

/// The number is no stub's any more.
fn reset(held: &mut Held) {
    held.list.unmap();
    let fd = held.fd;
    **held = Inner::new();
    mark_stub(fd, stub_mark::NONE);
}

/// Whether a descriptor is a stub, asked of the kernel.
pub(crate) fn is_stub(fd: c_int) -> bool {
    sys::identity(fd).is_some_and(|(identity, mode)| {
        is_regular(mode) && TABLE.trees.is_stub(fd, identity.device)
    })
}

// ---- what the hooks of open, dup, fork and close call --------------------------------------------

/// A call just gave a descriptor of a regular file on `device`, opened with `flags`; whether it is a stub.
/// `Err`: it is, and cannot be used.
pub(crate) fn opened(fd: c_int, device: u64, flags: c_int) -> Result<bool, c_int> {
    if table::in_vfork_child() || !TABLE.trees.is_stub(fd, device) {
        return Ok(false);
    }
    if fd as usize >= table::FDS {
        // The library has no room to keep it, and the kernel no bytes of it.
        return Err(libc::EMFILE);
    }
    mark_stub(fd, stub_mark::OWN);
    let Entered::Held(mut held) = enter(fd) else {
        return Ok(true);
    };
    held.stub.flags |= flags & libc::O_TRUNC;
    match adopt(&mut held) {
        Ok(()) => Ok(true),
        Err(libc::ENODEV) => {
            reset(&mut held);
            Ok(false)
        }
        Err(errno) => {
            reset(&mut held);
            Err(errno)
        }
    }
}

/// `fd` is a copy of a stub's descriptor.
pub(crate) fn copied(fd: c_int) {
    if fd < 0 || table::in_vfork_child() {
        return;
    }
    mark_stub(fd, stub_mark::SHARED);
    // At once: a stub without a name lives as long as firnd knows somebody who has it open.
    if let Entered::Held(mut held) = enter(fd) {
        let _ = adopt(&mut held);
    }
}

/// At the start of a program: descriptors that it inherited.
pub(crate) fn inherited() {
    if !TABLE.trees.any() {
        return;
    }
    // SAFETY: a path of our own, which ends.
    let dir = unsafe {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
        syscall!(
            libc::SYS_openat,
            libc::AT_FDCWD,
            c"/proc/self/fd".as_ptr(),
            flags,
            0usize
        ) as c_int
    };
    if dir < 0 {
        (0..1024).for_each(inherit);
        return;
    }
    let mut buffer = [0u64; 256];
    loop {
        // SAFETY: the kernel writes at most so many bytes.
        let len = unsafe {
            syscall!(
                libc::SYS_getdents64,
                dir,
                buffer.as_mut_ptr(),
                size_of_val(&buffer)
            )
        };
        if len <= 0 {
            break;
        }
        let mut at = 0usize;
        while at < len as usize {
            // SAFETY: an entry that the kernel wrote: number, offset, its length, a type, its name.
            let (size, name) = unsafe {
                let entry = buffer.as_ptr().cast::<u8>().wrapping_add(at);
                let size = entry.wrapping_add(16).cast::<u16>().read_unaligned() as usize;
                (
                    size,
                    std::ffi::CStr::from_ptr(entry.wrapping_add(19).cast()),
                )
            };
            let number = std::str::from_utf8(name.to_bytes())
                .ok()
                .and_then(|name| name.parse().ok());
            if let Some(fd) = number.filter(|fd| *fd != dir) {
                inherit(fd);
            }
            at += size.max(1);
        }
    }
    sys::close(dir);
}

fn inherit(fd: c_int) {
    if is_stub(fd) {
        mark_stub(fd, stub_mark::SHARED);
    }
}

/// Others are about to get the descriptor: its offset is the kernel's from now on.
pub(crate) fn share(fd: c_int) {
    match enter(fd) {
        Entered::Held(mut held) => {
            give_back(&mut held);
            mark_stub(fd, stub_mark::SHARED);
        }
        Entered::Again(entry) if entry.is_private() => {
            sys::lseek(
                fd,
                entry.offset.load(Ordering::Relaxed) as i64,
                libc::SEEK_SET,
            );
        }
        _ => {}
    }
}

/// The descriptor's status flags may have changed.
pub(crate) fn flags_changed(fd: c_int) {
    if let Entered::Held(mut held) = enter(fd) {
        let status = sys::fcntl(fd, libc::F_GETFL, 0) as c_int;
        held.stub.flags = status | held.stub.flags & libc::O_TRUNC;
    }
}

/// Before close(2): what it returns, -errno where what was written could not be taken care of.
pub(crate) fn close(fd: c_int) -> isize {
    let Entered::Held(mut held) = enter(fd) else {
        return 0;
    };
    let mut result = 0;
    if held.stub.adopted || held.stub.wrote {
        let once = !held.stub.wrote;
        result = match release(&mut held, once) {
            Ok(()) => 0,
            Err(errno) => -(errno as isize),
        };
    }
    reset(&mut held);
    result
}

/// Tells firnd that the descriptor is closed. `once`: if firnd is gone, nobody needs to know.
fn release(held: &mut Held, once: bool) -> Result<(), c_int> {
    give_back(held);
    if once {
        let _ = connect::ask(held.link, Op::Release, held.token, 0);
        return Ok(());
    }
    request(held, Op::Release, 0, 0, Payload::none()).map(drop)
}

/// The offset is the kernel's again.
fn give_back(held: &mut Held) {
    if held.private {
        descriptor::return_offset(held, |_| true);
    }
}

// ---- requests ------------------------------------------------------------------------------------

/// Makes sure that firnd knows the descriptor.
fn adopt(held: &mut Held) -> Result<(), c_int> {
    if held.stub.adopted {
        return Ok(());
    }
    let mut waited = 0;
    loop {
        let socket = TABLE.trees.data_socket(held.identity.device);
        if let Some(link) = socket.and_then(|socket| TABLE.links.to_at_any_rate(&socket)) {
            let wanted = held.stub.flags & (libc::O_ACCMODE | libc::O_TRUNC);
            let again = if held.stub.known { ADOPT_AGAIN } else { 0 };
            let request = Request::new(Op::Adopt, 0, wanted as u64).with_len(again);
            let mut payload = Payload {
                fd: sys::borrow(held.fd),
                ..Payload::none()
            };
            match connect::call(link, &request, &mut payload) {
                Ok(reply) => {
                    answered(&reply)?;
                    (held.link, held.token) = (link, reply.file_id);
                    held.stub.adopted = true;
                    held.stub.known = true;
                    held.stub.flags &= !libc::O_TRUNC;
                    held.stub.granted = false;
                    held.lease.clear();
                    held.list.unmap();
                    return Ok(());
                }
                Err(CallError::Fault) => return Err(libc::EFAULT),
                Err(CallError::NotSent | CallError::NoReply) => {}
            }
        }
        if waited >= WAIT_MS.load(Ordering::Relaxed) {
            report::left(Reason::NoConnection);
            return Err(libc::EIO);
        }
        sys::sleep_ms(PAUSE_MS);
        waited += PAUSE_MS;
        TABLE.trees.read();
    }
}

/// What a reply means for the call; ENODEV: it is no stub.
fn answered(reply: &Reply) -> Result<(), c_int> {
    match Status::from_word(reply.status) {
        Status::Ok => Ok(()),
        Status::Failed => Err(reply.errno as c_int),
        Status::BadToken => Err(libc::ENODEV),
        _ => Err(libc::EIO),
    }
}

/// A request about the descriptor. One that was perhaps carried out before the connection ended is repeated,
/// unless that would do it twice.
fn request(
    held: &mut Held,
    op: Op,
    arg: u64,
    len: u32,
    mut payload: Payload<'_>,
) -> Result<Reply, c_int> {
    // A firnd that goes again and again is none.
    for _ in 0..64 {
        adopt(held)?;
        let request = Request::new(op, held.token, arg).with_len(len);
        match connect::call(held.link, &request, &mut payload) {
            Ok(reply) if Status::from_word(reply.status) == Status::BadToken => {}
            Ok(reply) => return answered(&reply).map(|()| reply),
            Err(CallError::Fault) => return Err(libc::EFAULT),
            Err(CallError::NoReply) if op == Op::Write && arg == AT_END => {
                return Err(libc::EIO);
            }
            Err(CallError::NotSent | CallError::NoReply) => {}
        }
        held.stub.adopted = false;
    }
    Err(libc::EIO)
}

/// Writes by requests; bytes written and where, or the errno where there are none. `at`: [`AT_END`] appends.
fn write_by_requests(
    held: &mut Held,
    run: Run<'_, Readable>,
    at: u64,
) -> Result<(usize, u64), c_int> {
    let mut done = 0;
    let mut place = at;
    while done < run.len() {
        let data = run.rest(done).first(DATA_BYTES_MAX);
        let payload = Payload {
            data: data.as_outgoing(),
            ..Payload::none()
        };
        let to = if at == AT_END {
            AT_END
        } else {
            at.wrapping_add(done as u64)
        };
        match request(held, Op::Write, to, data.len() as u32, payload) {
            Ok(reply) => {
                done += reply.count as usize;
                if at == AT_END {
                    place = reply
                        .slot
                        .wrapping_add(u64::from(reply.count))
                        .wrapping_sub(done as u64);
                }
            }
            Err(errno) if done == 0 => return Err(errno),
            Err(_) => break,
        }
    }
    held.stub.wrote = true;
    Ok((done, place))
}

/// firnd, over the data socket, as a descriptor's fallback.
pub(crate) enum Socket {}

impl Fallback for Socket {
    fn may_lease(held: &mut Held, total: usize) -> bool {
        if held.stub.granted {
            return true;
        }
        if !held.patience.may_ask(total) {
            return false;
        }
        match connect::ask(held.link, Op::OpenWrite, held.token, 0) {
            Some(reply) if connect::is_ok(&reply) => {
                held.file_id = reply.file_id;
                held.lease.clear();
                held.patience.granted();
                held.stub.granted = true;
            }
            Some(_) => hesitate(held, Reason::Refused),
            None => held.stub.adopted = false,
        }
        held.stub.granted
    }

    fn has_list(held: &mut Held, total: usize) -> bool {
        if held.stub.flags & libc::O_ACCMODE != libc::O_RDONLY {
            return false;
        }
        if !held.list.extents().is_empty() {
            held.patience.count_fast(total);
            return true;
        }
        if !held.patience.may_ask(total) || (total as u64) < LIST_BYTES_MIN {
            return false;
        }
        let answer = list::fetch_known(held);
        let is_listed = answer == Some(Status::Ok) && !held.list.extents().is_empty();
        if !is_listed {
            held.list.unmap();
            hesitate(held, Reason::Refused);
        }
        is_listed
    }

    fn leave(
        held: Held,
        _claim: Option<&mut Claim>,
        _at: Option<u64>,
        _call: Call,
    ) -> Result<Held, Handled> {
        Ok(held)
    }

    fn lease_lost(
        mut held: Held,
        _claim: &mut Claim,
        lost: LeaseLost,
        _done: usize,
        _call: Call,
    ) -> Result<Held, Handled> {
        held.stub.granted = false;
        held.lease.clear();
        match lost {
            LeaseLost::Full => {
                held.patience.wait_for_room();
                report::left(Reason::NoRoom);
            }
            LeaseLost::NoConnection | LeaseLost::Limited => {
                held.patience.wait_for(UNCONNECTED_BYTES);
                report::left(Reason::NoConnection);
            }
            LeaseLost::Revoked => hesitate(&mut held, Reason::Revoked),
        }
        Ok(held)
    }

    fn list_lost(
        mut held: Held,
        _claim: &mut Claim,
        _at: Option<u64>,
        _call: Call,
    ) -> Result<Held, Handled> {
        held.list.unmap();
        hesitate(&mut held, Reason::Changed);
        Ok(held)
    }

    fn write_at(held: &mut Held, run: Run<'_, Readable>, at: u64) -> Result<usize, c_int> {
        write_by_requests(held, run, at).map(|(done, _)| done)
    }

    fn read_at(held: &mut Held, run: Run<'_, Writable>, at: u64) -> Result<usize, c_int> {
        let mut done = 0;
        while done < run.len() {
            let into = run.rest(done).first(DATA_BYTES_MAX);
            let payload = Payload {
                room: into.as_incoming(),
                ..Payload::none()
            };
            let from = at.wrapping_add(done as u64);
            match request(held, Op::Read, from, into.len() as u32, payload) {
                Ok(reply) if reply.count == 0 => break,
                Ok(reply) => done += reply.count as usize,
                Err(errno) if done == 0 => return Err(errno),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    fn seek_in_file(held: &mut Held, offset: i64, whence: c_int) -> Result<u64, c_int> {
        let target = match whence {
            libc::SEEK_END => (size(held)? as i64)
                .checked_add(offset)
                .ok_or(libc::EOVERFLOW)?,
            // All of a file is data, up to its end: what POSIX allows to who does not know better.
            libc::SEEK_DATA | libc::SEEK_HOLE => {
                let size = size(held)? as i64;
                if offset < 0 || offset >= size {
                    return Err(libc::ENXIO);
                }
                if whence == libc::SEEK_DATA {
                    offset
                } else {
                    size
                }
            }
            _ => return Err(libc::EINVAL),
        };
        u64::try_from(target).map_err(|_| libc::EINVAL)
    }

    fn has_offset(_held: &Held) -> bool {
        true
    }
}

fn hesitate(held: &mut Held, reason: Reason) {
    report::left(reason);
    held.patience.hesitate();
}

/// Makes the offset private where nobody shares it.
fn own_offset(held: &mut Held) {
    if !held.private && stub_mark_of(held.fd) == stub_mark::OWN {
        descriptor::make_private(held);
    }
}

// ---- write ---------------------------------------------------------------------------------------

/// write(2) and its kin, at the descriptor's offset or at `at`.
pub(crate) fn write(
    fd: c_int,
    source: Source<'_>,
    at: Option<u64>,
    append: bool,
    call: Call,
) -> Handled {
    if source.is_outside() {
        return Handled::of(Err(libc::EFAULT));
    }
    let mut held = match enter(fd) {
        Entered::Held(held) => held,
        Entered::Again(entry) => return Handled::Done(write_again(fd, entry, source, at)),
        Entered::Not => return Handled::Forward(Ticket::NONE),
        Entered::Vforked => return Handled::of(Err(libc::EIO)),
    };
    let mut total = source.total().unwrap_or(CALL_BYTES_MAX);
    if let Err(handled) = prepare(&mut held, libc::O_RDONLY, total) {
        return handled;
    }
    let flags = held.stub.flags;
    let handled = if append || flags & libc::O_APPEND != 0 {
        append_all(held, source, at, total)
    } else {
        if let Some(limit) = sys::limit(libc::RLIMIT_FSIZE) {
            let from = at.unwrap_or_else(|| descriptor::current_offset(&held));
            if from >= limit {
                sys::raise(libc::SIGXFSZ);
                return Handled::of(Err(libc::EFBIG));
            }
            total = total.min(usize::try_from(limit - from).unwrap_or(usize::MAX));
        }
        held.stub.wrote = true;
        descriptor::write::<Socket>(held, source, (at, total), call)
    };
    let synced = flags & (libc::O_SYNC | libc::O_DSYNC) != 0;
    match handled {
        Handled::Done(done) if done > 0 && synced => match sync(fd, false) {
            Some(Err(errno)) => Handled::of(Err(errno)),
            _ => Handled::Done(done),
        },
        handled => handled,
    }
}

/// What comes before a write or read: the access mode `forbidden` fails, 0 bytes are done, and firnd knows the
/// descriptor.
fn prepare(held: &mut Held, forbidden: c_int, total: usize) -> Result<(), Handled> {
    if held.stub.flags & libc::O_ACCMODE == forbidden {
        return Err(Handled::of(Err(libc::EBADF)));
    }
    if total == 0 {
        return Err(Handled::of(Ok(0)));
    }
    adopt(held).map_err(|errno| Handled::of(Err(errno)))?;
    own_offset(held);
    Ok(())
}

fn append_all(mut held: Held, source: Source<'_>, at: Option<u64>, total: usize) -> Handled {
    let mut done = 0;
    let mut end = 0;
    for run in source.runs(0, total) {
        match write_by_requests(&mut held, run, AT_END) {
            Ok((more, place)) => {
                done += more;
                end = place.wrapping_add(more as u64);
                if more < run.len() {
                    break;
                }
            }
            Err(errno) if done == 0 => return Handled::of(Err(errno)),
            Err(_) => break,
        }
    }
    if at.is_none() {
        descriptor::set_offset(&held, end);
    }
    report::kernel(Call::Write);
    Handled::of(Ok(done))
}

/// A signal handler writes to the descriptor that the interrupted code is busy with, and over whose connection
/// it may be: it makes one of its own.
#[cold]
fn write_again(fd: c_int, entry: &'static Entry, source: Source<'_>, at: Option<u64>) -> isize {
    let Some(total) = source.total() else {
        return -(libc::EINVAL as isize);
    };
    let socket =
        sys::identity(fd).and_then(|(identity, _)| TABLE.trees.data_socket(identity.device));
    let Some(connection) = socket.and_then(|socket| connect::connect_once(&socket)) else {
        return -(libc::EIO as isize);
    };
    let flags = sys::fcntl(fd, libc::F_GETFL, 0) as c_int;
    let access = (flags & libc::O_ACCMODE) as u64;
    let adopt = Request::new(Op::Adopt, 0, access).with_len(ADOPT_AGAIN);
    let mut with_fd = Payload {
        fd: sys::borrow(fd),
        ..Payload::none()
    };
    let Ok(Reply { file_id: token, .. }) = connection.call(&adopt, &mut with_fd) else {
        return -(libc::EIO as isize);
    };
    let appends = flags & libc::O_APPEND != 0;
    let offset = match at {
        Some(at) => at,
        None if entry.is_private() => entry.offset.fetch_add(total as u64, Ordering::Relaxed),
        None => (sys::lseek(fd, total as i64, libc::SEEK_CUR) as u64).wrapping_sub(total as u64),
    };
    let mut done = 0usize;
    for run in source.runs(0, total) {
        let mut from = 0;
        while from < run.len() {
            let data = run.rest(from).first(DATA_BYTES_MAX);
            let to = if appends {
                AT_END
            } else {
                offset.wrapping_add(done as u64)
            };
            let request = Request::new(Op::Write, token, to).with_len(data.len() as u32);
            let mut payload = Payload {
                data: data.as_outgoing(),
                ..Payload::none()
            };
            match connection.call(&request, &mut payload) {
                Ok(reply) if connect::is_ok(&reply) => {
                    done += reply.count as usize;
                    from += reply.count as usize;
                }
                _ if done > 0 => return done as isize,
                _ => return -(libc::EIO as isize),
            }
        }
    }
    done as isize
}

/// lseek(2).
pub(crate) fn seek(fd: c_int, offset: i64, whence: c_int) -> Handled {
    match enter(fd) {
        Entered::Held(mut held) => {
            own_offset(&mut held);
            descriptor::seek::<Socket>(held, offset, whence)
        }
        Entered::Again(entry) if entry.is_private() && whence == libc::SEEK_CUR && offset == 0 => {
            Handled::Done(entry.offset.load(Ordering::Relaxed) as isize)
        }
        _ => Handled::Forward(Ticket::NONE),
    }
}

/// read(2) and its kin.
pub(crate) fn read(fd: c_int, target: Target<'_>, at: Option<u64>, call: Call) -> Handled {
    if target.is_outside() {
        return Handled::of(Err(libc::EFAULT));
    }
    let mut held = match enter(fd) {
        Entered::Held(held) => held,
        Entered::Again(_) | Entered::Vforked => return Handled::of(Err(libc::EIO)),
        Entered::Not => return Handled::Forward(Ticket::NONE),
    };
    let total = target.total().unwrap_or(CALL_BYTES_MAX);
    if let Err(handled) = prepare(&mut held, libc::O_WRONLY, total) {
        return handled;
    }
    descriptor::read::<Socket>(held, target, (at, total), call)
}

// ---- the rest ------------------------------------------------------------------------------------

fn size(held: &mut Held) -> Result<u64, c_int> {
    request(held, Op::Attr, 0, 0, Payload::none()).map(|reply| reply.size)
}

/// What the kernel does not know of a stub.
#[derive(Clone, Copy)]
pub(crate) struct Attr {
    /// Bytes of the file.
    pub(crate) size: u64,
    /// 512-byte blocks.
    pub(crate) blocks: u64,
    /// Its time of change was just set.
    pub(crate) told: bool,
}

impl Attr {
    fn of(reply: &Reply) -> Self {
        Self {
            size: reply.size,
            blocks: reply.slot,
            told: reply.count != 0,
        }
    }
}

/// Of a descriptor; `None`: it is no stub.
pub(crate) fn attr(fd: c_int) -> Option<Result<Attr, c_int>> {
    match enter(fd) {
        Entered::Held(mut held) => {
            let reply = request(&mut held, Op::Attr, 0, 0, Payload::none());
            Some(reply.map(|reply| Attr::of(&reply)))
        }
        Entered::Again(_) => attr_of(fd, c"".as_ptr(), libc::AT_EMPTY_PATH, None),
        _ => None,
    }
}

/// Of what a path leads to, if that still is the stub with this inode number on this device; `None`: it is
/// none, or nobody wrote to it.
pub(crate) fn attr_of(
    dir: c_int,
    path: *const libc::c_char,
    flags: c_int,
    expected: Option<(u64, u64)>,
) -> Option<Result<Attr, c_int>> {
    #[repr(C)]
    struct Handle {
        bytes: u32,
        kind: i32,
        words: [u32; 32],
    }
    if table::in_vfork_child() {
        return None;
    }
    let mut handle = Handle {
        bytes: 128,
        kind: 0,
        words: [0; 32],
    };
    let mut mount = 0i32;
    // Unlike stat(2), it follows only where it is told to.
    let follow = if flags & libc::AT_SYMLINK_NOFOLLOW == 0 {
        libc::AT_SYMLINK_FOLLOW
    } else {
        0
    };
    let flags = flags & libc::AT_EMPTY_PATH | follow;
    // SAFETY: the kernel writes at most `bytes` bytes behind the head; the path is the program's.
    let result = unsafe {
        syscall!(
            libc::SYS_name_to_handle_at,
            dir,
            path,
            &raw mut handle,
            &raw mut mount,
            flags
        )
    };
    if result < 0 || handle.bytes != 12 {
        return None;
    }
    let [generation, low, high, ..] = handle.words;
    let inode = u64::from(high) << 32 | u64::from(low);
    let device = match expected {
        Some((device, expected)) if expected == inode => device,
        Some(_) => return None,
        None => sys::identity(dir)?.0.device,
    };
    let request = Request::new(Op::AttrOf, inode, u64::from(generation));
    let mut waited = 0;
    loop {
        let socket = TABLE.trees.data_socket(device)?;
        let called = match TABLE.links.to_at_any_rate(&socket) {
            Some(link) => connect::call(link, &request, &mut Payload::none()),
            // In a signal handler, perhaps; else firnd is gone.
            None => connect::connect_once(&socket)
                .ok_or(CallError::NotSent)
                .and_then(|connection| connection.call(&request, &mut Payload::none())),
        };
        if let Ok(reply) = called {
            return match answered(&reply) {
                Ok(()) => Some(Ok(Attr::of(&reply))),
                Err(libc::ENODEV) => None,
                Err(errno) => Some(Err(errno)),
            };
        }
        if waited >= WAIT_MS.load(Ordering::Relaxed) {
            return Some(Err(libc::EIO));
        }
        sys::sleep_ms(PAUSE_MS);
        waited += PAUSE_MS;
        TABLE.trees.read();
    }
}

/// A request that answers with nothing but success; `None`: the descriptor is no stub.
fn plain(fd: c_int, op: Op, arg: u64, data: &[u64]) -> Option<Result<(), c_int>> {
    let mut held = match enter(fd) {
        Entered::Held(held) => held,
        Entered::Again(_) | Entered::Vforked => return Some(Err(libc::EIO)),
        Entered::Not => return None,
    };
    let writes = matches!(op, Op::Truncate | Op::Allocate);
    if writes && held.stub.flags & libc::O_ACCMODE == libc::O_RDONLY {
        return Some(Err(if op == Op::Truncate {
            libc::EINVAL
        } else {
            libc::EBADF
        }));
    }
    let data = data.as_bytes();
    let payload = Payload {
        data: data.into(),
        ..Payload::none()
    };
    held.stub.wrote |= writes;
    Some(request(&mut held, op, arg, data.len() as u32, payload).map(drop))
}

/// ftruncate(2).
pub(crate) fn truncate(fd: c_int, size: i64) -> Option<Result<(), c_int>> {
    if size < 0 {
        return Some(Err(libc::EINVAL));
    }
    plain(fd, Op::Truncate, size as u64, &[])
}

/// fsync(2), fdatasync(2).
pub(crate) fn sync(fd: c_int, data_only: bool) -> Option<Result<(), c_int>> {
    plain(fd, Op::Sync, u64::from(data_only), &[])
}

/// fallocate(2).
pub(crate) fn allocate(fd: c_int, mode: c_int, offset: i64, len: i64) -> Option<Result<(), c_int>> {
    if offset < 0 || len <= 0 {
        return Some(Err(libc::EINVAL));
    }
    plain(
        fd,
        Op::Allocate,
        mode as u32 as u64,
        &[offset as u64, len as u64],
    )
}

/// mmap(2): a copy. `None`: it is no stub.
///
/// # Safety
/// As for mmap(2).
pub(crate) unsafe fn map(
    at: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> Option<isize> {
    let mut held = match enter(fd) {
        Entered::Held(held) => held,
        Entered::Again(_) | Entered::Vforked => return Some(-(libc::ENODEV as isize)),
        Entered::Not => return None,
    };
    let shared = flags & libc::MAP_TYPE != libc::MAP_PRIVATE;
    let access = held.stub.flags & libc::O_ACCMODE;
    if access == libc::O_WRONLY {
        return Some(-(libc::EACCES as isize));
    }
    if shared && prot & libc::PROT_WRITE != 0 {
        return Some(
            -(if access == libc::O_RDONLY {
                libc::EACCES
            } else {
                libc::ENODEV
            } as isize),
        );
    }
    if len == 0 || offset < 0 || offset % 4096 != 0 {
        return Some(-(libc::EINVAL as isize));
    }
    let size = match size(&mut held) {
        Ok(size) => size,
        Err(errno) => return Some(-(errno as isize)),
    };
    let kept = flags & !(libc::MAP_TYPE | libc::MAP_SYNC);
    let flags = kept | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let first = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: what the program asked of mmap(2), but private and anonymous.
    let start = unsafe { syscall!(libc::SYS_mmap, at, len, first, flags, -1isize, 0usize) };
    if start < 0 {
        return Some(start);
    }
    let bytes = size.saturating_sub(offset as u64).min(len as u64) as usize;
    if bytes > 0 {
        // SAFETY: memory that was just mapped for writing, of which nobody knows yet.
        let run: Run<'_, Writable> = unsafe { Run::new(start as *mut c_void, bytes) };
        let filled = run.as_memory(|target| copy_file(&mut held, target, offset as u64, bytes));
        if let Err(errno) = filled {
            // SAFETY: as just mapped; nobody knows of it yet.
            unsafe { syscall!(libc::SYS_munmap, start, len) };
            return Some(-(errno as isize));
        }
    }
    if prot != first {
        // SAFETY: as just mapped, with the protection that the program asked for.
        unsafe { syscall!(libc::SYS_mprotect, start, len, prot) };
    }
    Some(start)
}

/// Bytes of the file, by the list or by requests.
fn copy_file(
    held: &mut Held,
    target: Target<'_>,
    offset: u64,
    total: usize,
) -> Result<usize, c_int> {
    adopt(held)?;
    if Socket::has_list(held, total) {
        if let Some(done) = list::copy_out::<Socket>(held, target, offset, total) {
            return Ok(done);
        }
        held.list.unmap();
        hesitate(held, Reason::Changed);
    }
    descriptor::read_by_fallback::<Socket>(held, target, offset, total)
}
