//! The outcome of a program's call in this library: it is done, or the kernel must serve it.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use crate::sys::with_errno;
use crate::table::Entry;

/// Outcome of a call in this library.
pub(crate) enum CallOutcome {
    /// The call is done, with this result. A negative result is `-errno`.
    Done(isize),
    /// The kernel must serve the call. The caller makes the call, and then finishes this value.
    Forward(KernelCall),
}

/// Result of one step of a call. `Ok` means that the call continues. `Err` ends the call here: with its result, which
/// may be a success, or because the kernel must serve it. So `?` ends the call too.
pub(crate) type Step<T> = Result<T, CallOutcome>;

impl CallOutcome {
    /// Makes the result of a call that has moved some bytes or has failed with an errno.
    pub(crate) fn from_result(result: Result<usize, c_int>) -> Self {
        match result {
            Ok(count) => Self::Done(count as isize),
            Err(errno) => Self::from_errno(errno),
        }
    }

    /// Makes the result of a call that has failed.
    pub(crate) fn from_errno(errno: c_int) -> Self {
        Self::Done(-(errno as isize))
    }

    /// Returns the result of the C library's function. A call that is not done is made by `call_kernel`.
    #[inline(always)]
    pub(crate) fn finish(self, call_kernel: impl FnOnce() -> isize) -> isize {
        match self {
            Self::Done(result) => with_errno(result),
            Self::Forward(kernel_call) => kernel_call.run(call_kernel),
        }
    }

    /// Makes the result of a call whose last step returned a number of bytes.
    pub(crate) fn from_step(step: Step<usize>) -> Self {
        match step {
            Ok(count) => Self::Done(count as isize),
            Err(outcome) => outcome,
        }
    }
}

/// A call that the kernel serves, and that may use the kernel's offset of a descriptor. The offset does not become
/// private before [`KernelCall::finish`].
pub(crate) struct KernelCall {
    entry: Option<&'static Entry>,
}

impl KernelCall {
    /// A call that uses no offset of a descriptor in the table.
    pub(crate) const WITHOUT_OFFSET: Self = Self { entry: None };

    /// Begins a call that uses the kernel's offset of a descriptor.
    pub(crate) fn begin(entry: &'static Entry) -> Self {
        entry.kernel_calls.fetch_add(1, Ordering::AcqRel);
        Self { entry: Some(entry) }
    }

    /// Makes the call by a function, and then ends it.
    #[inline(always)]
    pub(crate) fn run<T>(self, call_kernel: impl FnOnce() -> T) -> T {
        let result = call_kernel();
        self.finish();
        result
    }

    /// Ends the call after the kernel has returned.
    pub(crate) fn finish(self) {
        if let Some(entry) = self.entry {
            // The counter may be 0 by now: the number was reused, and its entry set anew.
            let decrement = |count: u32| Some(count.saturating_sub(1));
            let _ = entry
                .kernel_calls
                .fetch_update(Ordering::AcqRel, Ordering::Relaxed, decrement);
        }
    }
}
