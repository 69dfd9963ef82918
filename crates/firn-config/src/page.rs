//! Makes docs/CONFIGURATION.md, the reference of all options, from the table of options ([`TABLE`]).
//!
//! The page has, in this order: the sources of options; a table with one line of help for each option; a section for
//! each option; the options that set others ([`IMPLIED`]); the values that contradict each other ([`CONTRADICTIONS`]);
//! the other environment variables.

use std::fmt::Write;

use crate::environment::{VARIABLES, Variable};
use crate::table::{CONTRADICTIONS, IMPLIED, Implied, TABLE};

/// Text before the table of options.
const HEAD: &str = "# Configuration

<!-- Generated from the table in crates/firn-config by `cargo xtask pages`. Edit the table. -->

An option has the same name everywhere. The first of these sources that has it counts (`firn config` shows which):

1. a flag, `firn mount --arena-size 1G …`, or a key of `-o` or fstab, `-o arena-size=1G`;
2. the environment, `FIRN_ARENA_SIZE=1G`;
3. the user's file, `$XDG_CONFIG_HOME/firn/firn.toml` or `~/.config/firn/firn.toml`, `arena-size = \"1G\"`;
4. the system's file, `/etc/firn/firn.toml`;
5. the default.

Errors are an unknown name, a value out of range, a contradiction, and a flag and a key of `-o` with different
values.

* **Sizes** have a unit `K`, `M`, `G` or `T` (or `KiB`, …), powers of 1024: `1.5G`.
* **Durations** have a unit: `500ms`, `5s`, `2min`, `1h`; or `0`.
* **Switches** are `yes` or `no`; without a value they mean `yes`. `-o ro` is `read-only=yes`, `-o rw` is `read-only=no`.
* **Paths** are absolute and may have any bytes. In a file, a path that is not UTF-8 is written as in JSON:
  `spill = { escaped = \"/disk/caf\\\\xe9\" }`. In `-o` and fstab a path has no comma and no blank at its ends (`\\040` in fstab).
* In `-o`, underscores count as hyphens. `nodev nosuid noexec noatime sync dirsync` and their opposites go to the kernel;
  `defaults auto noauto user users owner group nofail _netdev x-* comment=*` and words about access times are skipped.

Allowed values are in italics.

| option | default | |
|---|---|---|
";

/// Text after the options. `@VARIABLES@` stands for the table of variables.
const TAIL: &str = "
## Environment variables that are not options

`firn` and firnd warn of a misspelt variable: it has no effect.

| variable | meaning |
|---|---|
@VARIABLES@| `NO_COLOR` | no colour, even on a terminal |
";

/// Returns the whole page: `HEAD`, one line and one section for each option, the implied values, the contradictions
/// and `TAIL`. In a [`Row`](crate::table::Row), `help` is the line, and `long` is the text of the section.
pub fn configuration_page() -> String {
    let mut page = HEAD.to_owned();
    for row in &TABLE {
        let default = if row.default.is_empty() {
            "–".to_owned()
        } else {
            format!("`{}`", row.default)
        };
        let name = row.name;
        writeln!(page, "| [`{name}`](#{name}) | {default} | {} |", row.help).expect("a String");
    }
    for row in &TABLE {
        let allowed = row.kind.allowed();
        // The last two values of a list are separated by a comma, like the others.
        let allowed_values = without_noun_of_range(&allowed).replace("` or `", "`, `");
        write!(
            page,
            "\n## {}\n\n*{allowed_values}*\n\n{}\n",
            row.name, row.long
        )
        .expect("a String");
    }
    page.push_str(IMPLIED_HEAD);
    for implied in &IMPLIED {
        let Implied {
            name,
            implied_name,
            value,
            ..
        } = implied;
        writeln!(page, "| `{name}` | `{implied_name}={value}` |").expect("a String");
    }
    page.push_str(CONTRADICTIONS_HEAD);
    for contradiction in &CONTRADICTIONS {
        writeln!(page, "* {}", contradiction.text).expect("a String");
    }
    page.push_str(&TAIL.replace("@VARIABLES@", &variable_rows()));
    page
}

/// Shortens the text about the allowed values: "a size from 1M to 1T" becomes "1M to 1T". The units of a range show
/// whether its values are sizes, durations or numbers. Returns any other text unchanged.
fn without_noun_of_range(allowed: &str) -> &str {
    ["a size from ", "a duration from ", "a number from "]
        .iter()
        .find_map(|noun| allowed.strip_prefix(noun))
        .unwrap_or(allowed)
}

/// Returns the rows of the table of variables.
fn variable_rows() -> String {
    VARIABLES
        .iter()
        .map(|Variable { name, meaning }| format!("| `{name}` | {meaning} |\n"))
        .collect()
}

const IMPLIED_HEAD: &str = "\n## Implied values\n\nAn option sets another option that it needs, unless you do.\n\n| Option | Implies |\n|---|---|\n";
const CONTRADICTIONS_HEAD: &str =
    "\n## Contradictions\n\nThe error message says what to change.\n\n";

#[cfg(test)]
mod tests {
    #[test]
    fn the_configuration_page_is_fresh() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/CONFIGURATION.md");
        let stored = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            stored == super::configuration_page(),
            "docs/CONFIGURATION.md is stale: run `cargo xtask pages`"
        );
    }
}
