//! Escaping of text for HTML.

use std::fmt;

/// Displays a value as text for HTML: no character of the value becomes markup.
pub struct HtmlText<T>(pub T);

impl<T: fmt::Display> fmt::Display for HtmlText<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::write(&mut Escaper(f), format_args!("{}", self.0))
    }
}

/// Writes text to a formatter, with each character that HTML would interpret replaced by its entity.
struct Escaper<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl fmt::Write for Escaper<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.chars().try_for_each(|character| match character {
            '&' => self.0.write_str("&amp;"),
            '<' => self.0.write_str("&lt;"),
            '>' => self.0.write_str("&gt;"),
            '"' => self.0.write_str("&quot;"),
            '\'' => self.0.write_str("&#39;"),
            // HTML cannot express control characters, and they could hide the text beside them. So each is replaced.
            control if control.is_control() => self.0.write_str("\u{fffd}"),
            other => self.0.write_char(other),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_becomes_markup() {
        let text = HtmlText("<script>\"'&\u{1b}\n").to_string();
        assert_eq!(text, "&lt;script&gt;&quot;&#39;&amp;\u{fffd}\u{fffd}");
    }
}
