//! Prints the report, at exit or before the program closes standard error.

use std::io::Write;

use crate::memory::Run;
use crate::report::{self, Call};
use crate::stub::{self, Append};
use crate::sys;
use crate::table::{self, tag};

/// Bytes of the longest line. Longer ones are cut.
const LINE_BYTES_MAX: usize = 200;

/// Prints the report once, if it is wanted.
pub(crate) fn print_report() {
    let pid = sys::pid();
    report::print_report_once(|text| {
        // The line is on the stack, because nothing here may allocate.
        let mut line = [0; LINE_BYTES_MAX];
        let mut unwritten = &mut line[..];
        // An error means that the line is cut.
        let _ = writeln!(unwritten, "firn-preload[{pid}]: {text}");
        let line_bytes = LINE_BYTES_MAX - unwritten.len();
        print_text(line.get(..line_bytes).unwrap_or_default());
    });
}

/// Writes to standard error, even if that is a stub.
fn print_text(text: &[u8]) {
    if table::descriptor_tag(libc::STDERR_FILENO) == tag::STUB {
        Run::from_bytes(text).as_memory(|source| {
            stub::write_stub(
                libc::STDERR_FILENO,
                source,
                None,
                Append::AsOpened,
                Call::Write,
            )
        });
    } else {
        sys::write_stderr(text);
    }
}
