//! Decides which lane (one I/O server) a new file goes to, from the options and the lane map. The rule is the same for
//! all placements.

use std::path::Path;

use firn_config::Options;
use firn_lanes::Rule;
use firn_lanes::rule::{Reason, add_numbers};

use crate::error::{AttachError, MAP_BYTES_MAX, MapFault};

/// Returns the rule that gives each name its lane. Fails if the lane map cannot be read.
pub(crate) fn placement_rule(options: &Options, host: &str) -> Result<Rule, AttachError> {
    let lanes = options.lanes.len().max(options.servers.len());
    let rule = Rule::new(lanes, host);
    let Some(path) = &options.lane_map else {
        return Ok(rule);
    };
    let refused = |why: MapFault| AttachError::LaneMap {
        path: path.clone(),
        why,
    };
    let text = read_map(path).map_err(refused)?;
    rule.with_map(&text).map_err(|error| refused(error.into()))
}

fn read_map(path: &Path) -> Result<String, MapFault> {
    use std::io::Read;
    let file = std::fs::File::open(path).map_err(MapFault::Io)?;
    let mut text = String::new();
    let limited = &mut file.take(MAP_BYTES_MAX + 1);
    limited.read_to_string(&mut text).map_err(MapFault::Io)?;
    if text.len() as u64 > MAP_BYTES_MAX {
        return Err(MapFault::TooLong);
    }
    Ok(text)
}

/// Returns the lane for a new file at this path below the mount point, and the reason as a sentence. If no lane is
/// returned, the choice depends on the existing files.
pub(crate) fn explain_rule(rule: &Rule, path: &Path) -> (Option<usize>, String) {
    let Some(name) = path.file_name() else {
        return (None, "the path is the top directory".into());
    };
    let above = path.parent().unwrap_or(Path::new(""));
    let sum = above.iter().fold(0, add_numbers);
    match rule.explain(sum, name) {
        None => (
            None,
            "the name has no number, so that is the lane with the fewest files of its directory"
                .into(),
        ),
        Some((lane, Reason::Line(line))) => {
            (Some(lane), format!("line {line} of the lane map matches"))
        }
        Some((lane, Reason::Number(number))) => {
            let count = rule.lane_count();
            let reason = format!(
                "the numbers in its path add up to {number}, modulo {count} lanes; where that lane has far more than its share of the directory's files, the one with the fewest"
            );
            (Some(lane), reason)
        }
        Some((lane, Reason::Balance)) => (
            Some(lane),
            "this lane has the fewest files of the directory".into(),
        ),
    }
}
