//! Decides which lane (one I/O server) a new file goes to, from the options and the lane map, a file of the user that
//! assigns names to lanes. The rule is the same for all values of the option `placement`.

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
    let to_error = |why: MapFault| AttachError::LaneMap {
        path: path.clone(),
        why,
    };
    let text = read_map(path).map_err(to_error)?;
    rule.with_map(&text).map_err(|error| to_error(error.into()))
}

/// Reads a lane map. Fails if the file is longer than [`MAP_BYTES_MAX`].
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

/// The lane that a rule gives a new file.
pub(crate) struct LaneChoice {
    /// Index of the lane; `None` if the choice depends on the existing files.
    pub(crate) lane: Option<usize>,
    /// The reason as a sentence.
    pub(crate) reason: String,
}

/// Returns the lane (I/O server) that a new file at this path below the mount point gets, and the reason. The lane is
/// `None` if the choice depends on existing files, or if there is no file name.
pub(crate) fn explain_lane_choice(rule: &Rule, path: &Path) -> LaneChoice {
    let Some(name) = path.file_name() else {
        return LaneChoice {
            lane: None,
            reason: "the path is the top directory".into(),
        };
    };
    let directory = path.parent().unwrap_or(Path::new(""));
    let sum_of_numbers = directory.iter().fold(0, add_numbers);
    let Some((lane, reason)) = rule.explain(sum_of_numbers, name) else {
        return LaneChoice {
            lane: None,
            reason:
                "the name has no number, so the lane with the fewest files of its directory is chosen"
                    .into(),
        };
    };
    let reason = match reason {
        Reason::Line(line) => format!("line {line} of the lane map matches"),
        Reason::Number(sum) => {
            let count = rule.lane_count();
            format!(
                "the numbers in its path add up to {sum}, modulo {count} lanes; if that lane has far more than its \
                 share of the directory's files, the lane with the fewest is chosen"
            )
        }
        Reason::Balance => "this lane has the fewest files of the directory".into(),
    };
    LaneChoice {
        lane: Some(lane),
        reason,
    }
}
