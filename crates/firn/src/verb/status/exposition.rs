//! Prometheus text of one mount or of all.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use firn_client::Connection;

use super::ask_all;
use crate::failure::{DONE, Failure};
use crate::output;
use crate::verb::connect;

/// Prints the metrics of the mount of `path`, or of all mounts.
pub fn print(path: Option<&Path>) -> Result<u8, Failure> {
    let Some(path) = path else {
        let (texts, code) = ask_all(|mount| Connection::open(mount)?.metrics())?;
        return output::print(&merge(&texts)).map(|()| code);
    };
    let text = connect(path)?.1.metrics()?;
    output::print(&text).map(|()| DONE)
}

/// One family of metrics: `# HELP`, `# TYPE` and samples.
#[derive(Default)]
struct Family<'a> {
    comments: Vec<&'a str>,
    samples: Vec<&'a str>,
}

/// The samples of a family must stand together, under one `# HELP` and `# TYPE`. The texts may be long: root asks other
/// users' firnd, too.
fn merge(texts: &[String]) -> String {
    let mut families: Vec<Family> = Vec::new();
    let mut by_name = HashMap::new();
    let mut comments = HashSet::new();
    for line in texts
        .iter()
        .flat_map(|text| text.lines())
        .filter(|line| !line.is_empty())
    {
        let name = match line.strip_prefix("# ") {
            Some(comment) => comment.split(' ').nth(1).unwrap_or_default(),
            None => line.split(['{', ' ']).next().unwrap_or_default(),
        };
        let at = *by_name.entry(name).or_insert_with(|| {
            families.push(Family::default());
            families.len() - 1
        });
        let family = &mut families[at];
        match line.starts_with('#') {
            true if !comments.insert(line) => {}
            true => family.comments.push(line),
            false => family.samples.push(line),
        }
    }
    let lines = families
        .iter()
        .flat_map(|family| family.comments.iter().chain(&family.samples));
    lines.map(|line| format!("{line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_two_mounts_stand_under_one_head() {
        let one = |mount: &str| {
            format!(
                "# HELP firn_a A.\n# TYPE firn_a gauge\nfirn_a{{m=\"{mount}\"}} 1\n# HELP firn_b B.\nfirn_b 2\n"
            )
        };
        assert_eq!(
            merge(&[one("x"), one("y")]),
            "# HELP firn_a A.\n# TYPE firn_a gauge\nfirn_a{m=\"x\"} 1\nfirn_a{m=\"y\"} 1\n# HELP firn_b B.\nfirn_b 2\nfirn_b 2\n"
        );
    }
}
