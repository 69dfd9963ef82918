//! The two output streams of a verb: data goes to stdout, and messages go to stderr.
//!
//! A reader can close its end of a pipe early (`firn status | head`). Then [`print()`] and its JSON forms return
//! [`Failure::OutputClosed`]; `println!` would panic.

use std::io::{self, IsTerminal, Write};

use firn_format::quote::printable;
use serde::Serialize;

use crate::failure::{FAILED, Failure};

/// Prints data on stdout. Returns [`Failure::OutputClosed`] if the reader of stdout is gone.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::OutputClosed,
            _ => Failure::new(FAILED, format!("cannot write to standard output: {error}")),
        })
}

/// Prints a value on stdout as indented JSON over several lines.
pub fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    print(&(encoded_text(serde_json::to_string_pretty(value))? + "\n"))
}

/// Prints a value on stdout as JSON on one line.
pub fn print_json_line(value: &impl Serialize) -> Result<(), Failure> {
    print(&(encoded_text(serde_json::to_string(value))? + "\n"))
}

/// Returns the text of an encoded value, or the failure of the verb if the value cannot be encoded.
fn encoded_text(result: serde_json::Result<String>) -> Result<String, Failure> {
    result
        .map_err(|error| Failure::new(FAILED, format!("cannot write the output as JSON: {error}")))
}

/// Prints a message on stderr as one line. Characters that could break the line or steer the terminal are escaped.
pub fn print_message(text: &str) {
    print_raw_message(&printable(text));
}

/// Prints a message on stderr unchanged. The caller must escape untrusted text.
pub fn print_raw_message(text: &str) {
    // A closed stderr leaves no other stream for the message, so the error is ignored.
    let _ = writeln!(io::stderr().lock(), "firn: {text}");
}

/// Whether text for one output stream is coloured.
#[derive(Clone, Copy, Debug)]
pub struct Paint {
    is_coloured: bool,
}

impl Paint {
    /// Returns the setting for stdout: colours on a terminal that has them, unless NO_COLOR is set (no-color.org).
    pub fn stdout() -> Self {
        Self {
            is_coloured: io::stdout().is_terminal() && is_colour_allowed(),
        }
    }

    /// Returns the setting for stderr, by the same rule as for stdout.
    pub fn stderr() -> Self {
        Self {
            is_coloured: io::stderr().is_terminal() && is_colour_allowed(),
        }
    }

    /// Returns whether text is coloured.
    pub fn is_coloured(self) -> bool {
        self.is_coloured
    }

    /// Returns `text` in the colour of an error (red).
    pub fn error(self, text: &str) -> String {
        self.with_sgr("31", text)
    }

    /// Returns `text` in the colour of a warning (yellow).
    pub fn warning(self, text: &str) -> String {
        self.with_sgr("33", text)
    }

    /// Returns `text` in the colour of a healthy state (green).
    pub fn healthy(self, text: &str) -> String {
        self.with_sgr("32", text)
    }

    /// Returns `text` as the head line of a table (bold).
    pub fn head(self, text: &str) -> String {
        self.with_sgr("1", text)
    }

    /// Returns `text` with the SGR code `code` (ECMA-48), or unchanged if text is not coloured.
    fn with_sgr(self, code: &str, text: &str) -> String {
        if self.is_coloured {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}

/// Returns whether the environment allows colours: NO_COLOR is unset or empty, and TERM is not `dumb`.
fn is_colour_allowed() -> bool {
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    !no_color && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}
