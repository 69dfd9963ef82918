//! One descriptor of ours: its offset, its lease or list, and what serves the bytes that neither can.
//!
//! ```text
//!            hook ── Held, ProgramMemory ──► write / read / seek
//!                                             │ claim a range of the offset
//!                       lease (slabs) ◄───────┤───────► list (extents)
//!                                             │ what does not go there
//!                            Fallback: Kernel (a mount) or Socket (a stub)
//! ```
//!
//! A call claims its range of the offset before it moves bytes: a signal handler that interrupts it and uses the
//! same descriptor takes the next range. What was claimed and not used is given up, unless somebody claimed more
//! behind it.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use crate::lease::{self, LeaseLost};
use crate::list;
use crate::memory::{Readable, Run, Source, Target, Writable};
use crate::report::{self, Call};
use crate::sys;
use crate::table::{Entry, Held};

/// What became of a call.
pub(crate) enum Handled {
    /// It is done: the result, -errno where it failed.
    Done(isize),
    /// The kernel has to do it.
    Forward(Ticket),
}

impl Handled {
    pub(crate) fn of(result: Result<usize, c_int>) -> Self {
        Self::Done(match result {
            Ok(done) => done as isize,
            Err(errno) => -(errno as isize),
        })
    }
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

/// Who serves what goes past neither lease nor list.
pub(crate) trait Fallback {
    /// Whether bytes may go into leases now; asks for the grant where it is time to.
    fn may_lease(held: &mut Held, total: usize) -> bool;
    /// Whether there is a list of where the bytes are; asks for it where that is worth it.
    fn has_list(held: &mut Held, total: usize) -> bool;
    /// Leaves a call to somebody else, where there is somebody, with the offset given back; else `Ok`.
    fn leave(
        held: Held,
        claim: Option<&mut Claim>,
        at: Option<u64>,
        call: Call,
    ) -> Result<Held, Handled>;
    /// A lease was lost after `done` bytes of a claim.
    fn lease_lost(
        held: Held,
        claim: &mut Claim,
        lost: LeaseLost,
        done: usize,
        call: Call,
    ) -> Result<Held, Handled>;
    /// What was copied by the list means nothing: it does not hold any more.
    fn list_lost(
        held: Held,
        claim: &mut Claim,
        at: Option<u64>,
        call: Call,
    ) -> Result<Held, Handled>;
    /// Writes at an offset; fewer bytes than given where that is all that goes.
    fn write_at(held: &mut Held, run: Run<'_, Readable>, at: u64) -> Result<usize, c_int>;
    /// Reads at an offset; 0 at the end of the file.
    fn read_at(held: &mut Held, run: Run<'_, Writable>, at: u64) -> Result<usize, c_int>;
    /// lseek(2) from the end of the file, or to data or a hole: the new offset.
    fn seek_in_file(held: &mut Held, offset: i64, whence: c_int) -> Result<u64, c_int>;
    /// Whether the offset is known here, private or not.
    fn has_offset(held: &Held) -> bool;
}

// ---- patience --------------------------------------------------------------------------------------

/// Bytes by the fallback before firnd is asked again after a grant that ended early: at first …
const HESITATE_BYTES_MIN: u64 = 128 << 10;
/// … and at last, which is also what a grant must have brought to count as worth it.
pub(crate) const HESITATE_BYTES_MAX: u64 = 8 << 20;
/// The same where the arena had no room: a drain's step.
const FULL_BYTES: u64 = 1 << 20;

/// When firnd is asked again. All zeros: now.
pub(crate) struct Patience {
    /// Bytes by the fallback before firnd is asked again.
    wait_bytes: u64,
    /// Bytes in leases or by lists since the last grant.
    fast_bytes: u64,
    /// How often firnd refused or took back.
    refusals: u32,
}

impl Patience {
    pub(crate) const fn new() -> Self {
        Self {
            wait_bytes: 0,
            fast_bytes: 0,
            refusals: 0,
        }
    }

    pub(crate) fn fast_bytes(&self) -> u64 {
        self.fast_bytes
    }

    pub(crate) fn refusals(&self) -> u32 {
        self.refusals
    }

    #[inline(always)]
    pub(crate) fn count_fast(&mut self, bytes: usize) {
        self.fast_bytes = self.fast_bytes.wrapping_add(bytes as u64);
    }

    /// Whether it is time to ask; if not, `total` more bytes go by the fallback.
    pub(crate) fn may_ask(&mut self, total: usize) -> bool {
        if self.wait_bytes == 0 {
            return true;
        }
        self.wait_bytes = self.wait_bytes.saturating_sub(total as u64);
        false
    }

    /// firnd agreed.
    pub(crate) fn granted(&mut self) {
        self.fast_bytes = 0;
    }

    /// Next time after so many bytes.
    pub(crate) fn wait_for(&mut self, bytes: u64) {
        self.wait_bytes = bytes;
    }

    /// The arena has no room.
    pub(crate) fn wait_for_room(&mut self) {
        self.wait_bytes = FULL_BYTES;
    }

    pub(crate) fn count_refusal(&mut self) {
        self.refusals = self.refusals.saturating_add(1);
    }

    /// A grant ended: after one that brought little firnd is asked later each time.
    pub(crate) fn hesitate(&mut self) {
        if self.fast_bytes < HESITATE_BYTES_MAX {
            let wait = HESITATE_BYTES_MIN << self.refusals.min(6);
            self.wait_bytes = wait.min(HESITATE_BYTES_MAX);
            self.count_refusal();
        } else {
            self.refusals = 0;
        }
        self.fast_bytes = 0;
    }
}

// ---- the offset ------------------------------------------------------------------------------------

/// A range that a call works on.
pub(crate) struct Claim {
    pub(crate) offset: u64,
    total: usize,
    of: Range,
}

/// What a claim was taken from.
enum Range {
    /// The call named its offset.
    Given,
    /// The offset is past it for good: somebody claimed more behind it.
    Passed,
    /// The private offset, which is behind it now.
    Private,
    /// The kernel's offset, which others share.
    Shared,
    /// The private offset, given back to the kernel after so many bytes.
    GivenBack(usize),
}

impl Claim {
    /// At `at`, or the next `total` bytes of the offset.
    #[inline(always)]
    fn take(held: &mut Held, at: Option<u64>, total: usize) -> Self {
        let (offset, of) = match at {
            Some(at) => (at, Range::Given),
            None if held.private => (sys::add(&held.entry.offset, total as u64), Range::Private),
            None => {
                let end = sys::lseek(held.fd, total as i64, libc::SEEK_CUR);
                let start =
                    u64::try_from(end).map_or(u64::MAX, |end| end.wrapping_sub(total as u64));
                (start, Range::Shared)
            }
        };
        Self { offset, total, of }
    }

    /// One that was taken from the private offset.
    pub(crate) fn private(at: Option<u64>, offset: u64, total: usize) -> Self {
        let of = if at.is_some() {
            Range::Given
        } else {
            Range::Private
        };
        Self { offset, total, of }
    }

    /// Whether it ends beyond what a file may have.
    fn is_beyond_files(&self) -> bool {
        let end = self.offset.checked_add(self.total as u64);
        end.is_none_or(|end| end > i64::MAX as u64)
    }

    /// Whether nobody depends on where it ends: the offset can stand after its first `done` bytes again.
    pub(crate) fn cut(&self, held: &Held, done: usize) -> bool {
        let used = self.offset.wrapping_add(done as u64);
        match self.of {
            Range::Given => true,
            Range::Private => {
                let end = self.offset.wrapping_add(self.total as u64);
                // Not where a signal handler claimed more behind it.
                let (success, failure) = (Ordering::Relaxed, Ordering::Relaxed);
                let offset = &held.entry.offset;
                offset.compare_exchange(end, used, success, failure).is_ok()
            }
            Range::Shared if self.offset != u64::MAX => {
                let back = (self.total - done) as i64;
                sys::lseek(held.fd, -back, libc::SEEK_CUR) >= 0
            }
            Range::Shared | Range::GivenBack(_) | Range::Passed => false,
        }
    }

    /// Whether the offset stands at its begin, in the kernel.
    pub(crate) fn is_given_back(&self) -> bool {
        matches!(self.of, Range::GivenBack(0))
    }

    /// The kernel has the offset from now on, `done` bytes into the claim if it was `cut` there.
    pub(crate) fn give_back(&mut self, is_cut: bool, done: usize) {
        self.of = match &self.of {
            Range::Private if is_cut => Range::GivenBack(done),
            Range::Private => Range::Passed,
            Range::Given => Range::Given,
            _ => return,
        };
    }

    /// The call is over: `done` bytes of the claim were used.
    fn settle(&self, held: &Held, done: usize) {
        match self.of {
            Range::GivenBack(already) if done > already => {
                sys::lseek(held.fd, (done - already) as i64, libc::SEEK_CUR);
            }
            Range::Private | Range::Shared if done < self.total => {
                self.cut(held, done);
            }
            _ => {}
        }
    }
}

/// The offset becomes private, from where the kernel has it.
pub(crate) fn make_private(held: &mut Held) -> bool {
    // A handler that wrote between the two steps would move an offset that nobody reads.
    sys::without_signals(|| {
        let offset = sys::lseek(held.fd, 0, libc::SEEK_CUR);
        held.entry.offset.store(offset as u64, Ordering::Relaxed);
        held.private = offset >= 0;
    });
    held.private
}

/// The private offset is the kernel's again, if `is_same` says that the descriptor still is the one it was.
pub(crate) fn return_offset(held: &mut Held, is_same: impl FnOnce(&Held) -> bool) {
    sys::without_signals(|| {
        held.private = false;
        if is_same(held) {
            let offset = held.entry.offset.load(Ordering::Relaxed) as i64;
            sys::lseek(held.fd, offset, libc::SEEK_SET);
        }
    });
}

/// Where the offset stands.
pub(crate) fn current_offset(held: &Held) -> u64 {
    if held.private {
        held.entry.offset.load(Ordering::Relaxed)
    } else {
        sys::lseek(held.fd, 0, libc::SEEK_CUR) as u64
    }
}

/// Sets the offset.
pub(crate) fn set_offset(held: &Held, offset: u64) {
    if held.private {
        held.entry.offset.store(offset, Ordering::Relaxed);
    } else {
        sys::lseek(held.fd, offset as i64, libc::SEEK_SET);
    }
}

// ---- calls -----------------------------------------------------------------------------------------

/// Writes `total` bytes at the descriptor's offset, or at `at`.
pub(crate) fn write<F: Fallback>(
    mut held: Held,
    source: Source<'_>,
    (at, total): (Option<u64>, usize),
    call: Call,
) -> Handled {
    let leases = F::may_lease(&mut held, total) && source.is_good();
    if !leases {
        held = match F::leave(held, None, at, call) {
            Ok(held) => held,
            Err(handled) => return handled,
        };
    }
    let claim = Claim::take(&mut held, at, total);
    if claim.is_beyond_files() {
        claim.cut(&held, 0);
        return match F::leave(held, None, at, call) {
            Ok(_) => Handled::of(Err(libc::EFBIG)),
            Err(handled) => handled,
        };
    }
    let (done, lost) = if leases {
        lease::fill(&mut held, source, claim.offset, total)
    } else {
        (0, None)
    };
    go_on::<F>(held, source, claim, (at, total), (done, lost), call)
}

/// The rest of a write of which `done` bytes went into leases.
pub(crate) fn go_on<F: Fallback>(
    mut held: Held,
    source: Source<'_>,
    mut claim: Claim,
    (at, total): (Option<u64>, usize),
    (mut done, lost): (usize, Option<LeaseLost>),
    call: Call,
) -> Handled {
    if done == total {
        report::fast(call, done);
        return Handled::Done(done as isize);
    }
    if let Some(lost) = lost {
        held = match F::lease_lost(held, &mut claim, lost, done, call) {
            Ok(held) => held,
            Err(handled) => return handled,
        };
        if done == 0 {
            held = match F::leave(held, Some(&mut claim), at, call) {
                Ok(held) => held,
                Err(handled) => return handled,
            };
        }
    }
    report::kernel(call);
    let mut failed = None;
    for run in source.runs(done, total - done) {
        match F::write_at(&mut held, run, claim.offset.wrapping_add(done as u64)) {
            Ok(more) => {
                done += more;
                if more < run.len() {
                    break;
                }
            }
            Err(errno) => {
                failed = Some(errno);
                break;
            }
        }
    }
    claim.settle(&held, done);
    Handled::of(match failed {
        Some(errno) if done == 0 => Err(errno),
        _ => Ok(done),
    })
}

/// Reads up to `total` bytes at the descriptor's offset, or at `at`.
pub(crate) fn read<F: Fallback>(
    mut held: Held,
    target: Target<'_>,
    (at, total): (Option<u64>, usize),
    call: Call,
) -> Handled {
    let listed = F::has_list(&mut held, total);
    if !listed {
        held = match F::leave(held, None, at, call) {
            Ok(held) => held,
            Err(handled) => return handled,
        };
    }
    let mut claim = Claim::take(&mut held, at, total);
    if claim.offset > i64::MAX as u64 {
        return Handled::of(Err(libc::EINVAL));
    }
    if listed {
        let left = held.list.size().saturating_sub(claim.offset);
        let wanted = total.min(usize::try_from(left).unwrap_or(usize::MAX));
        if !target.is_good(wanted) {
            held = match F::leave(held, Some(&mut claim), at, call) {
                Ok(held) => held,
                Err(handled) => return handled,
            };
        } else if let Some(done) = list::copy_out::<F>(&mut held, target, claim.offset, total) {
            claim.settle(&held, done);
            report::fast(call, done);
            return Handled::Done(done as isize);
        } else {
            held = match F::list_lost(held, &mut claim, at, call) {
                Ok(held) => held,
                Err(handled) => return handled,
            };
        }
    }
    report::kernel(call);
    let result = read_by_fallback::<F>(&mut held, target, claim.offset, total);
    claim.settle(&held, result.unwrap_or(0));
    Handled::of(result)
}

/// Reads by the fallback; an errno where it gave nothing.
pub(crate) fn read_by_fallback<F: Fallback>(
    held: &mut Held,
    target: Target<'_>,
    offset: u64,
    total: usize,
) -> Result<usize, c_int> {
    let mut done = 0;
    for run in target.runs(0, total) {
        match F::read_at(held, run, offset.wrapping_add(done as u64)) {
            Ok(got) => {
                done += got;
                if got < run.len() {
                    break;
                }
            }
            Err(errno) if done == 0 => return Err(errno),
            Err(_) => break,
        }
    }
    Ok(done)
}

/// lseek(2).
pub(crate) fn seek<F: Fallback>(mut held: Held, offset: i64, whence: c_int) -> Handled {
    if !F::has_offset(&held) {
        return Handled::Forward(Ticket::of(held.entry));
    }
    match seek_to::<F>(&mut held, offset, whence) {
        Ok(target) => Handled::Done(target as isize),
        Err(errno) => Handled::Done(-(errno as isize)),
    }
}

fn seek_to<F: Fallback>(held: &mut Held, offset: i64, whence: c_int) -> Result<u64, c_int> {
    report::fast(Call::Lseek, 0);
    let now = |held: &Held| current_offset(held) as i64;
    let target = match whence {
        libc::SEEK_SET => offset,
        libc::SEEK_CUR => now(held).checked_add(offset).ok_or(libc::EOVERFLOW)?,
        _ => {
            let target = F::seek_in_file(held, offset, whence)?;
            set_offset(held, target);
            return Ok(target);
        }
    };
    let target = u64::try_from(target).map_err(|_| libc::EINVAL)?;
    if whence == libc::SEEK_SET || offset != 0 {
        set_offset(held, target);
    }
    Ok(target)
}
