//! `firn.toml`: the names of the table as keys of the top level, nothing else.

use std::io::ErrorKind;
use std::path::Path;

use crate::error::ConfigError;
use crate::resolve::{Given, Origin};
use crate::suggest::nearest;
use crate::table::row;

/// The options that `path` gives; none if there is no such file.
pub fn read_file(path: &Path) -> Result<Vec<Given>, ConfigError> {
    match std::fs::read_to_string(path) {
        Ok(text) => parse(path, &text),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(Vec::new())
        }
        Err(error) => Err(file_error(path, format!("cannot be read: {error}"))),
    }
}

fn parse(path: &Path, text: &str) -> Result<Vec<Given>, ConfigError> {
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        let line = error.span().map_or(1, |span| 1 + text[..span.start].matches('\n').count());
        file_error(path, format!("line {line}: {}", error.message()))
    })?;
    table.iter().map(|(key, value)| given(path, key, value)).collect()
}

fn given(path: &Path, key: &str, value: &toml::Value) -> Result<Given, ConfigError> {
    // Underscores would be a second way to write each key of a file that programs may edit: refuse them here.
    let Some(row) = row(key).filter(|row| row.name == key) else {
        let origin = Origin::File(path.to_owned());
        return Err(ConfigError::Unknown { origin, name: key.to_owned(), nearest: nearest(key) });
    };
    let text = match value {
        toml::Value::String(text) => text.clone(),
        toml::Value::Integer(number) => number.to_string(),
        toml::Value::Boolean(true) => "yes".to_owned(),
        toml::Value::Boolean(false) => "no".to_owned(),
        other => {
            let message = format!(
                "{key}: the type {} is not possible here, write {}",
                other.type_str(),
                row.kind.allowed()
            );
            return Err(file_error(path, message));
        }
    };
    Ok(Given { row, text })
}

fn file_error(path: &Path, message: String) -> ConfigError {
    ConfigError::File { path: path.display().to_string(), message }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_text(text: &str) -> Result<Vec<Given>, String> {
        parse(Path::new("/etc/firn/firn.toml"), text).map_err(|error| error.to_string())
    }

    #[test]
    fn numbers_booleans_and_strings_are_values() {
        let given = parse_text("io-threads = 8\npopulate = false\narena-size = \"1G\"").unwrap();
        let mut texts: Vec<_> = given.iter().map(|given| (given.row.name, given.text.as_str())).collect();
        texts.sort_unstable();
        assert_eq!(texts, [("arena-size", "1G"), ("io-threads", "8"), ("populate", "no")]);
    }

    #[test]
    fn errors_name_the_file_and_the_line_or_key() {
        let error = parse_text("io-threads = 8\nclose = ").unwrap_err();
        assert!(error.starts_with("/etc/firn/firn.toml: line 2: "), "{error}");
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
