//! Parses and formats sizes and durations.
//!
//! * A size is a number with an optional unit K, M, G or T (or KiB, MiB, …), which are powers of 1024. `KB` and `MB`
//!   are refused, because many readers understand them as powers of 1000.
//! * A duration has a unit: `ms`, `s`, `min` or `h`. A number without a unit, other than 0, is refused: some readers
//!   understand it as milliseconds and others as seconds.
//!
//! Invariant: parsing a formatted value returns the same value.

/// Units of sizes: the letter, and the exponent of the power of two.
const SIZE_UNITS: [(&str, u32); 4] = [("K", 10), ("M", 20), ("G", 30), ("T", 40)];
/// Units of durations in milliseconds. The largest come first, so that [`duration_text`] uses the largest that divides.
const DURATION_UNITS: [(&str, u64); 4] =
    [("h", 3_600_000), ("min", 60_000), ("s", 1000), ("ms", 1)];

/// Parses a size such as `65536`, `64K`, `4MiB` or `1.5G`, and returns its bytes. The error says how to write a size.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let (digits, unit) = split_unit(text);
    let Some(shift) = size_shift(unit) else {
        return Err(format!(
            "`{text}` is not a size: write a number and K, M, G or T, such as 256M (powers of 1024)"
        ));
    };
    multiply(digits, 1u64 << shift).ok_or_else(|| {
        format!("`{text}` is not a size: write a whole number of bytes below 16 EiB, such as 256M")
    })
}

/// Returns the exponent of the power of two that a unit of sizes stands for.
fn size_shift(unit: &str) -> Option<u32> {
    if matches!(unit, "" | "B") {
        return Some(0);
    }
    let letter = unit
        .strip_suffix("iB")
        .or_else(|| unit.strip_suffix("ib"))
        .unwrap_or(unit);
    let (_, shift) = SIZE_UNITS
        .iter()
        .find(|(name, _)| name.eq_ignore_ascii_case(letter))?;
    Some(*shift)
}

/// Formats `bytes` as the shortest text that [`parse_size`] reads back exactly.
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

/// Parses a duration such as `500ms`, `1s`, `2min` or `0`, and returns its milliseconds. The error says how to write a
/// duration.
pub fn parse_duration_ms(text: &str) -> Result<u64, String> {
    let (digits, unit) = split_unit(text);
    if unit.is_empty() && digits == "0" {
        return Ok(0);
    }
    if unit.is_empty() && !digits.is_empty() {
        return Err(format!("`{text}` lacks a unit: write {text}ms or {text}s"));
    }
    let unit_name = if unit == "m" { "min" } else { unit };
    let known_unit = DURATION_UNITS.iter().find(|(name, _)| *name == unit_name);
    let Some((_, unit_ms)) = known_unit else {
        return Err(format!(
            "`{text}` is not a duration: write a number and ms, s, min or h, such as 5s"
        ));
    };
    multiply(digits, *unit_ms).ok_or_else(|| {
        format!("`{text}` is not a duration: write a whole number of milliseconds, such as 500ms")
    })
}

/// Formats `ms` as the shortest text that [`parse_duration_ms`] reads back exactly.
pub fn duration_text(ms: u64) -> String {
    let unit = DURATION_UNITS
        .iter()
        .find(|(_, factor)| ms != 0 && ms.is_multiple_of(*factor));
    match unit {
        Some((name, factor)) => format!("{}{name}", ms / factor),
        None => "0".to_owned(),
    }
}

/// Splits a text after its digits and decimal point, and returns both parts.
fn split_unit(text: &str) -> (&str, &str) {
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    (digits, unit.trim_start())
}

/// Returns the product of a decimal number, which may have a fraction, and a factor. Returns `None` if `digits` is not
/// a number, or if the product is not a whole number or too large.
fn multiply(digits: &str, factor: u64) -> Option<u64> {
    let Some((whole, fraction)) = digits.split_once('.') else {
        return digits.parse::<u64>().ok()?.checked_mul(factor);
    };
    let whole: u64 = whole.parse().ok()?;
    let numerator: u128 = fraction.parse().ok()?;
    let denominator = 10u128.checked_pow(fraction.len().try_into().ok()?)?;
    let fraction_product = numerator.checked_mul(u128::from(factor))?;
    if !fraction_product.is_multiple_of(denominator) {
        return None;
    }
    let fraction_product = u64::try_from(fraction_product / denominator).ok()?;
    whole.checked_mul(factor)?.checked_add(fraction_product)
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
