//! Sizes and durations as people write them.
//!
//! A size is a number and, if need be, K, M, G or T (also KiB, MiB, …): powers of 1024. `KB` and `MB`
//! are refused, because half the world means 1000 by them. A duration carries its unit (`ms`, `s`,
//! `min`, `h`), because a bare number is milliseconds to one reader and seconds to the next.

/// The letters of sizes, each 1024 times the one before.
const SIZE_UNITS: [(&str, u32); 4] = [("K", 10), ("M", 20), ("G", 30), ("T", 40)];
/// Units of durations in milliseconds, largest first, so that [`duration_text`] takes the first that divides.
const DURATION_UNITS: [(&str, u64); 4] =
    [("h", 3_600_000), ("min", 60_000), ("s", 1000), ("ms", 1)];

/// Bytes of a size such as `65536`, `64K`, `4MiB`, `1.5G`.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let (digits, unit) = split_unit(text);
    let bare = unit
        .strip_suffix("iB")
        .or_else(|| unit.strip_suffix("ib"))
        .unwrap_or(unit);
    let shift = match (
        unit,
        SIZE_UNITS
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(bare)),
    ) {
        ("" | "B", _) => 0,
        (_, Some((_, shift))) => *shift,
        _ => {
            return Err(format!(
                "`{text}` is not a size: write a number and K, M, G or T, such as 256M (powers of 1024)"
            ));
        }
    };
    scale(digits, 1u64 << shift).ok_or_else(|| {
        format!("`{text}` is not a size: write a whole number of bytes below 16 EiB, such as 256M")
    })
}

/// The shortest exact way to write `bytes` that [`parse_size`] reads back.
pub fn size_text(bytes: u64) -> String {
    let unit = SIZE_UNITS
        .iter()
        .rev()
        .find(|(_, shift)| bytes != 0 && bytes.trailing_zeros() >= *shift);
    match unit {
        Some((name, shift)) => format!("{}{name}", bytes >> shift),
        None => bytes.to_string(),
    }
}

/// Milliseconds of a duration such as `500ms`, `1s`, `2min`, `0`.
pub fn parse_duration_ms(text: &str) -> Result<u64, String> {
    let (digits, unit) = split_unit(text);
    if unit.is_empty() && digits == "0" {
        return Ok(0);
    }
    if unit.is_empty() && !digits.is_empty() {
        return Err(format!("`{text}` lacks a unit: write {text}ms or {text}s"));
    }
    let unit = if unit == "m" { "min" } else { unit };
    let (_, factor) = DURATION_UNITS
        .iter()
        .find(|(name, _)| *name == unit)
        .ok_or_else(|| {
            format!("`{text}` is not a duration: write a number and ms, s, min or h, such as 5s")
        })?;
    scale(digits, *factor).ok_or_else(|| {
        format!("`{text}` is not a duration: write a whole number of milliseconds, such as 500ms")
    })
}

/// The shortest exact way to write `ms` that [`parse_duration_ms`] reads back.
pub fn duration_text(ms: u64) -> String {
    let unit = DURATION_UNITS
        .iter()
        .find(|(_, factor)| ms != 0 && ms.is_multiple_of(*factor));
    match unit {
        Some((name, factor)) => format!("{}{name}", ms / factor),
        None => "0".to_owned(),
    }
}

fn split_unit(text: &str) -> (&str, &str) {
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    (digits, unit.trim_start())
}

/// `digits` (with an optional fraction) times `factor`, exactly, or nothing.
fn scale(digits: &str, factor: u64) -> Option<u64> {
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let whole: u64 = whole.parse().ok()?;
    let fraction = match fraction {
        "" if digits.contains('.') => return None,
        "" => 0,
        some => {
            let tenth = 10u128.checked_pow(some.len().try_into().ok()?)?;
            let scaled = some.parse::<u128>().ok()?.checked_mul(u128::from(factor))?;
            if !scaled.is_multiple_of(tenth) {
                return None;
            }
            u64::try_from(scaled / tenth).ok()?
        }
    };
    whole.checked_mul(factor)?.checked_add(fraction)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_size_reads_back_as_written(bytes: u64) {
            prop_assert_eq!(parse_size(&size_text(bytes)), Ok(bytes));
        }

        #[test]
        fn a_duration_reads_back_as_written(ms: u64) {
            prop_assert_eq!(parse_duration_ms(&duration_text(ms)), Ok(ms));
        }

        #[test]
        fn a_size_with_a_unit_is_the_number_times_the_unit(number in 0u64..1 << 20, unit in 0usize..4, tail in prop::sample::select(vec!["", "iB"])) {
            let (name, shift) = SIZE_UNITS[unit];
            prop_assert_eq!(parse_size(&format!("{number}{name}{tail}")), Ok(number << shift));
        }

        #[test]
        fn no_text_makes_the_parsers_panic(text: String) {
            let _ = (parse_size(&text), parse_duration_ms(&text));
        }
    }

    #[test]
    fn fractions_count_when_they_are_exact() {
        assert_eq!(parse_size("1.5G"), Ok(3 << 29));
        assert_eq!(parse_duration_ms("0.5s"), Ok(500));
        assert!(parse_size("0.3").is_err());
        assert!(parse_size("1.").is_err());
    }

    #[test]
    fn decimal_units_and_bare_durations_are_refused_with_advice() {
        assert!(parse_size("256MB").unwrap_err().contains("such as 256M"));
        assert_eq!(
            parse_duration_ms("5").unwrap_err(),
            "`5` lacks a unit: write 5ms or 5s"
        );
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        assert!(parse_size("99999999T").is_err());
        assert!(parse_size("-1").is_err());
        assert!(parse_size("").is_err());
        assert!(parse_duration_ms("").is_err());
    }
}
