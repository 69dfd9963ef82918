//! Formats quantities, names and tables for output that people read.

use std::path::Path;

pub use firn_format::quantity::{bytes, count, rate, seconds};
use firn_format::quote::quoted;
use firn_protocol::figures::Unit;

/// Pads the cells of a table whose first row holds the heads.
///
/// Each column gets the width of its widest cell. Columns whose head is in `right_aligned` are aligned to the right.
/// The last column gets no padding.
pub fn pad_columns<R: AsRef<[String]> + AsMut<[String]>>(rows: &mut [R], right_aligned: &[&str]) {
    let column_count = rows.first().map_or(0, |head| head.as_ref().len());
    for column in 0..column_count.saturating_sub(1) {
        let cell_widths = rows.iter().map(|row| row.as_ref()[column].chars().count());
        let width = cell_widths.max().unwrap_or(0);
        let is_right_aligned = right_aligned.contains(&rows[0].as_ref()[column].as_str());
        for row in rows.iter_mut() {
            let cell = &mut row.as_mut()[column];
            *cell = if is_right_aligned {
                format!("{cell:>width$}")
            } else {
                format!("{cell:<width$}")
            };
        }
    }
}

/// Returns a figure's value in the unit that the end of its name gives.
pub fn figure(name: &str, value: f64) -> String {
    match Unit::from_figure_name(name) {
        Unit::BytesPerSecond => rate(value),
        Unit::Bytes => bytes(value as u64),
        Unit::Seconds => seconds(value),
        Unit::Count => value.to_string(),
    }
}

/// Returns the name that the kernel has for this host, as `uname -n` prints it.
pub fn own_host_name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

/// Returns a text with all characters escaped that could break a line, steer a terminal, or make two names look alike.
pub fn escaped(text: &str) -> String {
    quoted(text.as_bytes())
}

/// Returns a path with all characters escaped that could break a line, steer a terminal, or make two paths look alike.
pub fn path(path: &Path) -> String {
    quoted(path.as_os_str().as_encoded_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_break_its_line() {
        assert_eq!(escaped("a\nb\x1b[31m"), r"a\nb\x1b[31m");
    }
}
