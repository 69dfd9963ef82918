//! Descriptors open for writing: bytes into leased slabs instead of into the kernel.
//!
//! A descriptor is a candidate at first. At a write firnd is asked; while it agrees, the offset is private and
//! writes go past the kernel. Whatever does not fit there (no room, a lease taken back, a descriptor that
//! others got) gives the offset back, and the call goes to the kernel as it came.
//!
//! A write claims its range of the offset before it copies: a signal handler that interrupts it and writes
//! to the same descriptor takes the next range and goes through the kernel.
//!
//! A number that was closed by a raw call: firnd ended its leases at the close, so the first write finds them
//! revoked, sees by its identity that the descriptor is another one, and leaves it alone.

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

use firn_direct::slab_writer::{Appended, SlabWriter};
use firn_format::data_socket::{Op, Reply, Status, Token};
use firn_format::piece::PIECE_BYTES;
use libc::iovec;

use crate::connect;
use crate::opened::token;
use crate::probe;
use crate::report::{self, Call, Reason};
use crate::sys;
use crate::table::{self, Entered, Entry, Held, TABLE, tag};

/// What the kernel takes in one call at most (`MAX_RW_COUNT`).
pub(crate) const CALL_BYTES_MAX: usize = 0x7fff_f000;
/// Vectors in one call (`UIO_MAXIOV`).
pub(crate) const PARTS_MAX: c_int = 1024;
/// Refusals after which a descriptor is left to the kernel for good.
const REFUSALS_MAX: u32 = 16;
/// Bytes through the kernel after a refusal, and what a lease must have brought to count as worth it.
const PATIENCE_BYTES: u64 = 8 << 20;
/// Bytes through the kernel where the arena had no room: a drain's step.
const FULL_BYTES: u64 = 1 << 20;
/// Who has written much will write as much again, but not more than a lease holds.
const WANTED_BYTES_MAX: u64 = 4 << 20;

/// What became of a call.
pub(crate) enum Went {
    /// It is done: the result, -errno where it failed.
    Past(isize),
    /// The kernel has to do it.
    Kernel(Ticket),
}

/// A call of the kernel's that may use the kernel's offset of one of our descriptors.
pub(crate) struct Ticket {
    entry: Option<&'static Entry>,
}

impl Ticket {
    /// Of a descriptor that is not ours.
    pub(crate) const NONE: Self = Self { entry: None };

    /// The offset must not become private before [`Ticket::done`].
    pub(crate) fn of(entry: &'static Entry) -> Self {
        entry.in_kernel.fetch_add(1, Ordering::AcqRel);
        Self { entry: Some(entry) }
    }

    /// The call has returned.
    pub(crate) fn done(self) {
        if let Some(entry) = self.entry {
            let less = |count: u32| Some(count.saturating_sub(1));
            let _ = entry
                .in_kernel
                .fetch_update(Ordering::AcqRel, Ordering::Relaxed, less);
        }
    }
}

/// Bytes that vectors hold, as the kernel counts them; `None` where it would refuse them.
pub(crate) fn total_of(parts: &[iovec]) -> Option<usize> {
    let total = parts
        .iter()
        .try_fold(0usize, |sum, part| sum.checked_add(part.iov_len))?;
    (total <= isize::MAX as usize).then_some(total.min(CALL_BYTES_MAX))
}

/// The usual write, at the descriptor's offset or at `at`: short, and into the lease that is there. `None`: it is
/// another one, and nothing was done.
///
/// # Safety
/// `data` is the program's.
#[inline(always)]
pub(crate) unsafe fn write_on(
    fd: c_int,
    data: *const c_void,
    len: usize,
    at: Option<u64>,
    call: Call,
) -> Option<Went> {
    let Entered::Held(mut held) = table::enter(fd) else {
        return None;
    };
    if held.tag != tag::WRITER
        || !held.private
        || !held.has_writer
        || len == 0
        || !probe::is_short(len)
    {
        return None;
    }
    let has_asked = held.has_asked;
    // SAFETY: `has_writer`.
    let writer = unsafe { held.writer.assume_init_mut() };
    if len > writer.free_bytes() as usize || (!has_asked && writer.is_half_full()) {
        return None;
    }
    if !probe::is_readable(data, len) {
        return None;
    }
    let offset = at.unwrap_or_else(|| sys::add(&held.entry.offset, len as u64));
    // SAFETY: `has_writer`.
    let writer = unsafe { held.writer.assume_init_mut() };
    // SAFETY: the bytes are the program's to give; `probe` says which bad pointers fault.
    let outcome = unsafe { writer.append(offset, data.cast(), len) };
    if outcome != Appended::Bytes(len) {
        return Some(go_on(
            held,
            iovec {
                iov_base: data.cast_mut(),
                iov_len: len,
            },
            (at, offset),
            outcome,
            call,
        ));
    }
    held.fast_bytes = held.fast_bytes.wrapping_add(len as u64);
    report::fast(call, len);
    Some(Went::Past(len as isize))
}

/// The rest of a write whose first try came to `outcome`.
#[cold]
fn go_on(
    mut held: Held,
    part: iovec,
    (at, offset): (Option<u64>, u64),
    outcome: Appended,
    call: Call,
) -> Went {
    let len = part.iov_len;
    let done = if let Appended::Bytes(done) = outcome {
        done
    } else {
        0
    };
    held.fast_bytes = held.fast_bytes.wrapping_add(done as u64);
    let left = iovec {
        iov_base: part.iov_base.wrapping_byte_add(done),
        iov_len: len - done,
    };
    let (more, loss) = match outcome {
        Appended::Revoked => (0, Some(LeaseLost::Revoked)),
        _ => put(
            &mut held,
            &[left],
            offset.wrapping_add(done as u64),
            len - done,
        ),
    };
    if loss.is_some() {
        return lose(held, &[part], (at, offset, len), (done + more, loss), call);
    }
    report::fast(call, len);
    Went::Past(len as isize)
}

/// Writes at the descriptor's offset, or at `at`.
pub(crate) fn write(fd: c_int, parts: &[iovec], at: Option<u64>, call: Call) -> Went {
    let mut held = match table::enter(fd) {
        Entered::Held(held) if held.tag == tag::WRITER => held,
        Entered::Again(entry) => return again(fd, entry, parts, at),
        _ => return Went::Kernel(Ticket::NONE),
    };
    let total = total_of(parts).filter(|total| *total > 0 && at.unwrap_or(0) <= i64::MAX as u64);
    let readable = || {
        parts
            .iter()
            .all(|part| probe::is_readable(part.iov_base, part.iov_len))
    };
    let Some(total) = total.filter(|_| readable()) else {
        return kernel(held, at, call);
    };
    if !held.private && !ask(&mut held, total as u64) {
        return kernel(held, at, call);
    }
    let offset = at.unwrap_or_else(|| sys::add(&held.entry.offset, total as u64));
    let loss = if offset
        .checked_add(total as u64)
        .is_some_and(|end| end <= i64::MAX as u64)
    {
        match put(&mut held, parts, offset, total) {
            (done, None) => {
                report::fast(call, done);
                return Went::Past(done as isize);
            }
            lost => lost,
        }
    } else {
        (0, Some(LeaseLost::Odd))
    };
    lose(held, parts, (at, offset, total), loss, call)
}

/// Why bytes did not go past the kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeaseLost {
    /// The lease was taken back, or the number is another descriptor now.
    Revoked,
    /// The arena has no room.
    Full,
    /// No connection, or firnd does not know the descriptor.
    NoConnection,
    /// A range that no file has.
    Odd,
}

/// Puts bytes into leases; how many, and why not all of them.
pub(crate) fn put(
    held: &mut Held,
    parts: &[iovec],
    offset: u64,
    total: usize,
) -> (usize, Option<LeaseLost>) {
    let mut done = 0;
    for part in parts {
        let len = part.iov_len.min(total - done);
        let mut taken = 0;
        while taken < len {
            let from = part.iov_base.cast_const().cast::<u8>().wrapping_add(taken);
            match put_some(
                held,
                from,
                len - taken,
                offset.wrapping_add(done as u64),
                total - done,
            ) {
                Ok(more) => {
                    taken += more;
                    done += more;
                }
                Err(loss) => return (done, Some(loss)),
            }
        }
    }
    (done, None)
}

/// Puts some of `len` bytes into the lease, or into a new one; `left` are still to come in this call.
#[inline(always)]
fn put_some(
    held: &mut Held,
    from: *const u8,
    len: usize,
    offset: u64,
    left: usize,
) -> Result<usize, LeaseLost> {
    for fresh in [false, true] {
        if fresh || !held.has_writer {
            lease(held, left)?;
        }
        // SAFETY: `has_writer`.
        let writer = unsafe { held.writer.assume_init_mut() };
        if left > writer.free_bytes() as usize && !held.has_asked {
            // This call needs the next lease: firnd finds one while the bytes are copied.
            ask_ahead(held, left);
        }
        // SAFETY: `has_writer`.
        let writer = unsafe { held.writer.assume_init_mut() };
        // SAFETY: the bytes are the program's to give; `probe` says which bad pointers fault.
        match unsafe { writer.append(offset, from, len) } {
            Appended::Bytes(more) if more > 0 => {
                held.fast_bytes = held.fast_bytes.wrapping_add(more as u64);
                if !held.has_asked && is_half_full(held) {
                    ask_ahead(held, left);
                }
                return Ok(more.min(len));
            }
            Appended::Revoked => return Err(LeaseLost::Revoked),
            _ => {}
        }
    }
    Err(LeaseLost::Full)
}

#[cold]
fn ask_ahead(held: &mut Held, left: usize) {
    held.has_asked = connect::ask_ahead(held.link, held.token, wanted(held, left));
}

fn is_half_full(held: &Held) -> bool {
    // SAFETY: called while `has_writer`.
    held.has_writer && unsafe { held.writer.assume_init_ref() }.is_half_full()
}

/// Bytes that a lease should hold, when `left` are at hand.
fn wanted(held: &Held, left: usize) -> u64 {
    held.fast_bytes.min(WANTED_BYTES_MAX).max(left as u64)
}

/// Gets the next lease.
#[cold]
fn lease(held: &mut Held, left: usize) -> Result<(), LeaseLost> {
    held.has_writer = false;
    if !sys::is_unlimited(libc::RLIMIT_FSIZE) {
        return Err(LeaseLost::Odd);
    }
    let ahead = if held.has_asked {
        connect::take_ahead(held.link, held.token)
    } else {
        None
    };
    held.has_asked = false;
    let ask = || connect::ask(held.link, Op::Lease, held.token, wanted(held, left));
    let reply = ahead.or_else(ask).ok_or(LeaseLost::NoConnection)?;
    match Status::from_word(reply.status) {
        Status::Ok => {}
        Status::Full => return Err(LeaseLost::Full),
        Status::Busy | Status::BadToken => return Err(LeaseLost::Revoked),
        _ => return Err(LeaseLost::NoConnection),
    }
    let writer = slab_writer(held, &reply).ok_or(LeaseLost::NoConnection)?;
    held.writer.write(writer);
    held.has_writer = true;
    Ok(())
}

fn slab_writer(held: &Held, reply: &Reply) -> Option<SlabWriter> {
    let mapping = connect::mapping(held.link)?;
    let slab = reply.lease;
    let records = u64::from(slab.record_count).checked_mul(PIECE_BYTES)?;
    let whole = slab.start < slab.end
        && mapping.has_shared(slab.chunk, u64::from(slab.end))
        && mapping.has_shared(slab.records, records)
        && mapping.has_shared(slab.writer, 8)
        && slab.records.is_multiple_of(8)
        && slab.writer.is_multiple_of(8);
    // SAFETY: all that the lease names is mapped, for good; firnd gives a lease once.
    whole.then(|| unsafe { SlabWriter::new(mapping.shared, slab, held.file_id) })
}

/// Whether writes may go past the kernel: asks firnd, unless it refused a short while ago.
#[cold]
fn ask(held: &mut Held, total: u64) -> bool {
    if held.patience_bytes > 0 {
        held.patience_bytes = held.patience_bytes.saturating_sub(total);
        return false;
    }
    if held.entry.in_kernel.load(Ordering::Acquire) != 0 || !sys::is_unlimited(libc::RLIMIT_FSIZE) {
        return false;
    }
    let unusual = libc::O_APPEND | libc::O_DIRECT | libc::O_SYNC | libc::O_DSYNC | libc::O_PATH;
    let flags = sys::fcntl(held.fd, libc::F_GETFL, 0);
    if flags < 0 || flags as c_int & unusual != 0 || !is_same(held) || held.refusals >= REFUSALS_MAX
    {
        held.set_tag(tag::NONE);
        return false;
    }
    match open_write(held, total) {
        Some(reply) if connect::is_ok(&reply) => begin(held, reply.file_id),
        Some(_) => {
            refused(held, Reason::Refused, PATIENCE_BYTES);
            false
        }
        None => {
            held.set_tag(tag::NONE);
            report::left(Reason::NoConnection);
            false
        }
    }
}

fn open_write(held: &mut Held, total: u64) -> Option<Reply> {
    let known = if held.link != 0 {
        connect::ask_open(held.link, held.token, total)
    } else {
        TABLE
            .devices
            .first_token(held.token)
            .and_then(|token| open_with(held, &token, total))
    };
    if known.is_some_and(|reply| Status::from_word(reply.status) != Status::BadToken) {
        return known;
    }
    let token = token(held.fd)?;
    open_with(held, &token, total)
}

fn open_with(held: &mut Held, token: &Token, total: u64) -> Option<Reply> {
    held.link = TABLE.links.to_write(token, total)?;
    held.token = token.token;
    connect::ask_open(held.link, held.token, total)
}

/// The offset becomes private.
fn begin(held: &mut Held, file_id: u64) -> bool {
    held.file_id = file_id;
    held.has_writer = false;
    // In the same trip as the grant.
    held.has_asked = true;
    held.fast_bytes = 0;
    // A handler that wrote between the two steps would move an offset that nobody reads.
    sys::without_signals(|| {
        let offset = sys::lseek(held.fd, 0, libc::SEEK_CUR);
        held.entry.offset.store(offset as u64, Ordering::Relaxed);
        held.private = offset >= 0;
    });
    held.private
}

fn refused(held: &mut Held, reason: Reason, patience_bytes: u64) {
    report::left(reason);
    held.patience_bytes = patience_bytes;
    held.refusals = held.refusals.saturating_add(1);
}

/// Whether the number still is the file that was opened.
fn is_same(held: &Held) -> bool {
    sys::identity(held.fd).is_some_and(|(identity, _)| identity == held.identity)
}

/// The offset is the kernel's again, and the descriptor a candidate.
pub(crate) fn give_back(held: &mut Held) {
    if !held.private {
        return;
    }
    sys::without_signals(|| {
        held.private = false;
        if is_same(held) {
            sys::lseek(
                held.fd,
                held.entry.offset.load(Ordering::Relaxed) as i64,
                libc::SEEK_SET,
            );
        }
    });
    if held.fast_bytes > 0 {
        sys::refresh_size(held.fd);
    }
    held.has_writer = false;
    held.has_asked = false;
}

/// After a grant that ended early firnd is not asked again at once: after 128 KiB, 256 KiB, ... 8 MiB.
fn hesitate(held: &mut Held, reason: Reason) {
    if held.fast_bytes < PATIENCE_BYTES {
        let shift = held.refusals.min(6);
        refused(
            held,
            reason,
            (PATIENCE_BYTES >> 6 << shift).min(PATIENCE_BYTES),
        );
    } else {
        held.refusals = 0;
        report::left(reason);
    }
}

/// The descriptor is the kernel's for good.
pub(crate) fn leave(mut held: Held, reason: Reason) {
    let granted = held.private;
    let link = held.link;
    let token = held.token;
    let end = if held.tag == tag::WRITER {
        Op::EndWrite
    } else {
        Op::EndRead
    };
    give_back(&mut held);
    held.list.unmap();
    held.set_tag(tag::NONE);
    drop(held);
    if granted {
        connect::ask(link, end, token, 0);
    }
    report::left(reason);
}

/// The rest of a write that did not go past the kernel.
#[cold]
fn lose(
    mut held: Held,
    parts: &[iovec],
    (at, offset, total): (Option<u64>, u64, usize),
    (done, loss): (usize, Option<LeaseLost>),
    call: Call,
) -> Went {
    let stranger = loss == Some(LeaseLost::Revoked)
        && token(held.fd).is_none_or(|token| token.token != held.token);
    if stranger {
        held.private = false;
        held.set_tag(tag::NONE);
        return if done > 0 {
            Went::Past(done as isize)
        } else {
            Went::Kernel(Ticket::NONE)
        };
    }
    let claimed = offset.wrapping_add(total as u64);
    let alone = at.is_none() && held.entry.offset.load(Ordering::Relaxed) == claimed;
    if alone {
        held.entry
            .offset
            .store(offset.wrapping_add(done as u64), Ordering::Relaxed);
    }
    give_back(&mut held);
    match loss {
        Some(LeaseLost::Full) => {
            held.patience_bytes = FULL_BYTES;
            report::left(Reason::NoRoom);
        }
        Some(LeaseLost::NoConnection | LeaseLost::Odd) => {
            held.patience_bytes = PATIENCE_BYTES;
            report::left(Reason::NoConnection);
        }
        _ => hesitate(&mut held, Reason::Revoked),
    }
    if done == 0 && (alone || at.is_some()) {
        return kernel(held, at, call);
    }
    report::kernel(call);
    let rest = pwrite_rest(held.fd, parts, offset, done, total);
    if alone && rest > 0 {
        sys::lseek(held.fd, rest as i64, libc::SEEK_CUR);
    }
    Went::Past(if rest < 0 && done > 0 {
        done as isize
    } else {
        rest.wrapping_add(done as isize * isize::from(rest >= 0))
    })
}

/// Writes all but the first `done` of `total` bytes through the kernel; how many, or -errno.
fn pwrite_rest(fd: c_int, parts: &[iovec], offset: u64, done: usize, total: usize) -> isize {
    let mut skip = done;
    let mut written = 0usize;
    for part in parts {
        let start = skip.min(part.iov_len);
        skip -= start;
        let len = (part.iov_len - start).min((total - done).saturating_sub(written));
        if len == 0 {
            continue;
        }
        let from = part
            .iov_base
            .cast_const()
            .cast::<u8>()
            .wrapping_add(start)
            .cast::<c_void>();
        let at = offset.wrapping_add((done + written) as u64);
        let result = sys::pwrite(fd, from, len, at);
        match usize::try_from(result) {
            Ok(more) => written += more,
            Err(_) if written == 0 => return result,
            Err(_) => break,
        }
        if (result as usize) < len {
            break;
        }
    }
    written as isize
}

/// Leaves this call to the kernel, with the kernel's offset right.
fn kernel(mut held: Held, at: Option<u64>, call: Call) -> Went {
    report::kernel(call);
    if at.is_some() {
        return Went::Kernel(Ticket::NONE);
    }
    if held.private {
        give_back(&mut held);
        if held.tag == tag::WRITER {
            hesitate(&mut held, Reason::Read);
        }
    }
    Went::Kernel(Ticket::of(held.entry))
}

/// A signal handler writes to the descriptor that the interrupted code is busy with: through the kernel,
/// behind what that code claimed.
#[cold]
fn again(fd: c_int, entry: &'static Entry, parts: &[iovec], at: Option<u64>) -> Went {
    if at.is_some() || !entry.is_private() {
        return Went::Kernel(Ticket::of(entry));
    }
    let Some(total) = total_of(parts) else {
        return Went::Kernel(Ticket::NONE);
    };
    let offset = sys::add(&entry.offset, total as u64);
    report::kernel(Call::Write);
    Went::Past(pwrite_rest(fd, parts, offset, 0, total))
}

/// What to do before a call that uses the kernel's offset of `fd`.
pub(crate) fn before_kernel(fd: c_int, call: Call) -> Ticket {
    match table::enter(fd) {
        Entered::Held(held) if held.tag != tag::INTERNAL => match kernel(held, None, call) {
            Went::Kernel(ticket) => ticket,
            Went::Past(_) => Ticket::NONE,
        },
        Entered::Again(entry) if entry.is_private() => {
            sys::lseek(
                fd,
                entry.offset.load(Ordering::Relaxed) as i64,
                libc::SEEK_SET,
            );
            Ticket::NONE
        }
        _ => Ticket::NONE,
    }
}

/// lseek(2); `None`: the kernel has to do it.
pub(crate) fn seek(fd: c_int, offset: i64, whence: c_int) -> Went {
    let entered = table::enter(fd);
    let entry = match &entered {
        Entered::Held(held) if held.private => held.entry,
        Entered::Again(entry) if entry.is_private() => entry,
        Entered::Held(held) if held.tag != tag::INTERNAL => {
            return Went::Kernel(Ticket::of(held.entry));
        }
        _ => return Went::Kernel(Ticket::NONE),
    };
    let now = entry.offset.load(Ordering::Relaxed) as i64;
    let target = match whence {
        libc::SEEK_SET => Some(offset),
        libc::SEEK_CUR => now.checked_add(offset),
        _ => {
            // From the end, or to data: that does not depend on the offset.
            let result = sys::lseek(fd, offset, whence);
            if result >= 0 {
                entry.offset.store(result as u64, Ordering::Relaxed);
            }
            report::kernel(Call::Lseek);
            return Went::Past(result);
        }
    };
    let Some(target) = target else {
        return Went::Past(-(libc::EOVERFLOW as isize));
    };
    if target < 0 {
        return Went::Past(-(libc::EINVAL as isize));
    }
    if target != now {
        entry.offset.store(target as u64, Ordering::Relaxed);
    }
    report::fast(Call::Lseek, 0);
    Went::Past(target as isize)
}
