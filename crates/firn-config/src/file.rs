//! Reads the options in a file `firn.toml`.
//!
//! The file is a TOML table without sections. Each key is the name of an option, in the one spelling of the table; each
//! value is a string, an integer, a boolean, or `{ escaped = "…" }` for a path that is not UTF-8. A file that does not
//! exist has no options. Errors name the file and the line or the key.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

use firn_format::quote::quoted_path;
use firn_protocol::path::unescaped;

use crate::error::ConfigError;
use crate::suggest::nearest;
use crate::table::row;
use crate::unchecked_option::{Origin, UncheckedOption};

/// Returns the options in the file `path`. A file that does not exist has none.
pub fn read_file(path: &Path) -> Result<Vec<UncheckedOption>, ConfigError> {
    match std::fs::read_to_string(path) {
        Ok(text) => parse(path, &text),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(Vec::new())
        }
        Err(error) => Err(file_error(path, format!("cannot be read: {error}"))),
    }
}

/// Parses the text of a file; `path` is for messages.
fn parse(path: &Path, text: &str) -> Result<Vec<UncheckedOption>, ConfigError> {
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        let line = error
            .span()
            .map_or(1, |span| 1 + text[..span.start].matches('\n').count());
        file_error(path, format!("line {line}: {}", error.message()))
    })?;
    table
        .iter()
        .map(|(key, value)| parse_entry(path, key, value))
        .collect()
}

/// Returns the option that one entry of the file sets; its value is checked later. The file's `path` is for messages.
fn parse_entry(
    path: &Path,
    key: &str,
    value: &toml::Value,
) -> Result<UncheckedOption, ConfigError> {
    // Programs may edit the file, so each key has exactly one spelling: no underscores and no alias.
    let Some(option_row) = row(key).filter(|found| found.name == key) else {
        let origin = Origin::File(path.to_owned());
        return Err(ConfigError::Unknown {
            origin,
            name: key.to_owned(),
            nearest: nearest(key),
        });
    };
    let text = match value {
        toml::Value::String(text) => text.into(),
        toml::Value::Integer(number) => number.to_string().into(),
        toml::Value::Boolean(true) => "yes".into(),
        toml::Value::Boolean(false) => "no".into(),
        toml::Value::Table(table) if is_escaped(table) => unescape_path(path, key, table)?,
        other => {
            let message = format!(
                "{key}: the type {} is not possible here, write {}",
                other.type_str(),
                option_row.kind.allowed()
            );
            return Err(file_error(path, message));
        }
    };
    Ok(UncheckedOption {
        row: option_row,
        text,
    })
}

/// Returns the path that a table `{ escaped = "…" }` stands for. It need not be UTF-8, and is escaped as in JSON
/// (`firn_protocol::path`).
fn unescape_path(file: &Path, key: &str, table: &toml::Table) -> Result<OsString, ConfigError> {
    match table["escaped"].as_str().and_then(unescaped) {
        Some(bytes) => Ok(OsString::from_vec(bytes)),
        None => Err(file_error(
            file,
            format!("{key}: after a backslash, write another one, or x and two hexadecimal digits"),
        )),
    }
}

/// Whether a table is `{ escaped = "…" }`.
fn is_escaped(table: &toml::Table) -> bool {
    table.len() == 1 && table.get("escaped").is_some_and(toml::Value::is_str)
}

fn file_error(path: &Path, message: String) -> ConfigError {
    ConfigError::File {
        path: quoted_path(path),
        message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_text(text: &str) -> Result<Vec<UncheckedOption>, String> {
        parse(Path::new("/etc/firn/firn.toml"), text).map_err(|error| error.to_string())
    }

    #[test]
    fn numbers_booleans_and_strings_are_values() {
        let options = parse_text("io-threads = 8\npopulate = false\narena-size = \"1G\"").unwrap();
        let mut texts: Vec<_> = options
            .iter()
            .map(|option| (option.row.name, option.text.to_str().unwrap()))
            .collect();
        texts.sort_unstable();
        assert_eq!(
            texts,
            [
                ("arena-size", "1G"),
                ("io-threads", "8"),
                ("populate", "no")
            ]
        );
    }

    #[test]
    fn a_path_that_is_not_utf_8_is_written_as_in_json() {
        let options = parse_text(r#"spill = { escaped = "/disk/caf\\xe9" }"#).unwrap();
        assert_eq!(options[0].text.as_encoded_bytes(), b"/disk/caf\xe9");
        let error = parse_text(r#"spill = { escaped = "\\e9" }"#).unwrap_err();
        assert!(error.contains("spill: after a backslash, write"), "{error}");
        assert!(
            parse_text(r#"spill = { escape = "/" }"#)
                .unwrap_err()
                .contains("type table")
        );
    }

    #[test]
    fn errors_name_the_file_and_the_line_or_key() {
        let error = parse_text("io-threads = 8\nclose = ").unwrap_err();
        assert!(
            error.starts_with("/etc/firn/firn.toml: line 2: "),
            "{error}"
        );
        assert_eq!(
            parse_text("clse = \"held\"").unwrap_err(),
            "/etc/firn/firn.toml: unknown option `clse`, did you mean `close`?"
        );
        assert_eq!(
            parse_text("close = [1]").unwrap_err(),
            "/etc/firn/firn.toml: close: the type array is not possible here, write `auto` or `drain` or `held`"
        );
    }
}
