//! Names and messages as a person may read them: nothing in them breaks a line, steers a terminal or turns the
//! direction of the text.
//!
//! JSON has the exact name, and no other place of a program's output has anything but what these functions give.

use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A name: printable characters as they are, a backslash doubled, all else as `\n`, `\x1b`, `\u{202e}`, and bytes
/// that are no UTF-8 as `\xff`. Two names are never shown alike.
pub fn quoted(name: &[u8]) -> String {
    let mut text = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '\\' => text.push_str("\\\\"),
                character => put(&mut text, character),
            }
        }
        for byte in chunk.invalid() {
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

/// [`quoted`], of a path.
pub fn quoted_path(path: &Path) -> String {
    quoted(path.as_os_str().as_bytes())
}

/// A message, whose names may be quoted already: as [`quoted`], but a backslash stays as it is.
pub fn printable(message: &str) -> String {
    let mut text = String::with_capacity(message.len());
    message
        .chars()
        .for_each(|character| put(&mut text, character));
    text
}

/// Whether [`printable`] would change it.
pub fn is_printable(message: &str) -> bool {
    message.chars().all(is_shown)
}

fn put(text: &mut String, character: char) {
    match character {
        '\n' => text.push_str("\\n"),
        '\t' => text.push_str("\\t"),
        '\r' => text.push_str("\\r"),
        shown if is_shown(shown) => text.push(shown),
        control if (control as u32) < 0x80 => {
            let _ = write!(text, "\\x{:02x}", control as u32);
        }
        hidden => {
            let _ = write!(text, "\\u{{{:x}}}", hidden as u32);
        }
    }
}

/// Neither a control, nor one of the characters that have no width, end a line or turn its direction (Unicode: `Cf`,
/// `Zl`, `Zp`).
fn is_shown(character: char) -> bool {
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
                    let shown = quoted(&name);
                    assert!(is_printable(&shown), "{shown:?}");
                    if let Some(other) = seen.insert(shown.clone(), name.clone()) {
                        assert_eq!(other, name, "both are {shown}");
                    }
                }
            }
        }
    }
}
