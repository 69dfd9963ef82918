//! Escapes names and messages for output, so that no character breaks a line, controls a terminal or changes the
//! direction of the text.
//!
//! All output of Firn's programs goes through these functions. Only JSON output contains the exact names.

use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Returns a name in printable form. Two different names never have the same form.
///
/// Printable characters stay as they are, and a backslash is doubled. Other characters become `\n`, `\x1b` or
/// `\u{202e}`, and bytes that are not UTF-8 become `\xff`.
pub fn quoted(name: &[u8]) -> String {
    let mut text = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '\\' => text.push_str("\\\\"),
                character => push_printable(&mut text, character),
            }
        }
        for byte in chunk.invalid() {
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

/// Returns a path in printable form, as [`quoted`] does.
pub fn quoted_path(path: &Path) -> String {
    quoted(path.as_os_str().as_bytes())
}

/// Returns a message in printable form, as [`quoted`] does, but without doubling backslashes: names in the message may
/// be quoted already.
pub fn printable(message: &str) -> String {
    let mut text = String::with_capacity(message.len());
    message
        .chars()
        .for_each(|character| push_printable(&mut text, character));
    text
}

/// Returns whether [`printable`] leaves a message unchanged.
pub fn is_printable(message: &str) -> bool {
    message.chars().all(is_visible)
}

/// Appends the printable form of a character.
fn push_printable(text: &mut String, character: char) {
    match character {
        '\n' => text.push_str("\\n"),
        '\t' => text.push_str("\\t"),
        '\r' => text.push_str("\\r"),
        visible if is_visible(visible) => text.push(visible),
        control if (control as u32) < 0x80 => {
            let _ = write!(text, "\\x{:02x}", control as u32);
        }
        hidden => {
            let _ = write!(text, "\\u{{{:x}}}", hidden as u32);
        }
    }
}

/// Returns whether a character is printable. Control characters are not, and neither are characters that have no width,
/// end a line or change its direction (Unicode categories `Cf`, `Zl`, `Zp`).
fn is_visible(character: char) -> bool {
    let is_hidden = matches!(character,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}');
    !character.is_control() && !is_hidden
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_usual_name_is_shown_as_it_is() {
        for name in ["step_100/rank0", "Prüfpunkt 7 (alt)", "検査点", "a'b\"c"] {
            assert_eq!(quoted(name.as_bytes()), name);
            assert_eq!(printable(name), name);
        }
    }

    #[test]
    fn controls_directions_and_bytes_are_spelt_out() {
        assert_eq!(quoted(b"a\nb\x1b[31m\x7f"), r"a\nb\x1b[31m\x7f");
        assert_eq!(
            quoted("\u{9b}31m\u{202e}txt\u{2066}".as_bytes()),
            r"\u{9b}31m\u{202e}txt\u{2066}"
        );
        assert_eq!(quoted(b"\xff\xfe\\n"), r"\xff\xfe\\n");
        assert_eq!(printable("\x1b]0;t\x07 \\x1b"), r"\x1b]0;t\x07 \x1b");
        assert!(is_printable(r"\x1b") && !is_printable("\u{2069}"));
    }

    #[test]
    fn no_two_names_are_shown_alike() {
        let mut seen = std::collections::HashMap::new();
        let parts: [&[u8]; 9] = [
            b"\n",
            b"\\n",
            b"\\",
            b"n",
            b"\x1b",
            b"\\x1b",
            b"\xff",
            b"\\xff",
            "\u{202e}".as_bytes(),
        ];
        for first in parts {
            for second in parts {
                for third in parts {
                    let name = [first, second, third].concat();
                    let visible = quoted(&name);
                    assert!(is_printable(&visible), "{visible:?}");
                    if let Some(other) = seen.insert(visible.clone(), name.clone()) {
                        assert_eq!(other, name, "both are {visible}");
                    }
                }
            }
        }
    }
}
