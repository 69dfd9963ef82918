//! stdout and stderr.
//!
//! Nothing here panics when the reader is gone, as `println!` does.

use std::io::{self, IsTerminal, Write};

use firn_format::quote::printable;
use serde::Serialize;

use crate::failure::{FAILED, Failure};

/// Prints data.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::Unread,
            _ => Failure::new(FAILED, format!("cannot write to standard output: {error}")),
        })
}

/// Prints a value as JSON over several lines.
pub fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    print(&(encoded(serde_json::to_string_pretty(value))? + "\n"))
}

/// Prints a value as one line of JSON.
pub fn print_json_line(value: &impl Serialize) -> Result<(), Failure> {
    print(&(encoded(serde_json::to_string(value))? + "\n"))
}

fn encoded(result: serde_json::Result<String>) -> Result<String, Failure> {
    result.map_err(|error| Failure::new(FAILED, format!("cannot write that as JSON: {error}")))
}

/// Says something to the user, in one line whatever names are in it.
pub fn say(text: &str) {
    say_lines(&printable(text));
}

/// Says what may have lines and colours of its own.
pub fn say_lines(text: &str) {
    // Without stderr the message is lost.
    let _ = writeln!(io::stderr().lock(), "firn: {text}");
}

/// Colours, or none.
#[derive(Clone, Copy, Debug)]
pub struct Paint {
    on: bool,
}

impl Paint {
    /// For stdout: on a terminal that has colours, unless NO_COLOR is set (no-color.org).
    pub fn stdout() -> Self {
        Self {
            on: io::stdout().is_terminal() && wanted(),
        }
    }

    /// For stderr.
    pub fn stderr() -> Self {
        Self {
            on: io::stderr().is_terminal() && wanted(),
        }
    }

    /// Whether there are colours.
    pub fn on(self) -> bool {
        self.on
    }

    /// What is wrong.
    pub fn bad(self, text: &str) -> String {
        self.with("31", text)
    }

    /// What deserves a look.
    pub fn odd(self, text: &str) -> String {
        self.with("33", text)
    }

    /// What is well.
    pub fn good(self, text: &str) -> String {
        self.with("32", text)
    }

    /// A head line.
    pub fn head(self, text: &str) -> String {
        self.with("1", text)
    }

    fn with(self, code: &str, text: &str) -> String {
        if self.on {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}

fn wanted() -> bool {
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    !no_color && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}
