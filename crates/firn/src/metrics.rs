//! The metrics of mounts in the Prometheus text format (exposition format 0.0.4), for `firn status --prometheus` and
//! `firn exporter`. They come from firnd, the daemon of a mount. A metric with its samples is a [`Figure`].

use std::collections::HashMap;
use std::fmt;

use firn_client::Mount;
use firn_protocol::figures::{Figure, Figures, Kind, Sample, Value};
use firn_protocol::{Scrape, Status};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet, prometheus_text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::Registry;

/// A mount that was asked for its metrics.
pub enum MountScrape {
    /// Its firnd answered with this status.
    Up(Box<Status>),
    /// Its firnd did not answer before the timeout.
    Down(Scrape),
}

impl MountScrape {
    /// Returns the mount as one that did not answer.
    pub fn down(mount: &Mount) -> Self {
        Self::Down(Scrape {
            host: crate::text::own_host_name(),
            backing: mount.backing.as_path().into(),
            mount_point: mount.mount_point.as_path().into(),
            up: false,
        })
    }

    /// Returns the labels that name the mount, and whether it answered.
    fn scrape(&self) -> Scrape {
        match self {
            Self::Up(status) => Scrape {
                host: status.host.clone(),
                backing: status.backing.clone(),
                mount_point: status.mount_point.clone(),
                up: true,
            },
            Self::Down(scrape) => scrape.clone(),
        }
    }

    /// Returns the status of a mount that answered.
    fn status(&self) -> Option<&Status> {
        match self {
            Self::Up(status) => Some(status),
            Self::Down(_) => None,
        }
    }
}

/// The metrics in the form that the registry of the encoder accepts.
#[derive(Debug)]
struct FigureCollector(Figures);

/// Returns the metrics of these mounts as text.
pub fn text(mounts: &[MountScrape]) -> String {
    let scrapes: Vec<Scrape> = mounts.iter().map(MountScrape::scrape).collect();
    let status_figures = Figures::from_statuses(mounts.iter().filter_map(MountScrape::status));
    let figures = status_figures.with(Figures::from_statuses(&scrapes));
    let mut registry = Registry::with_prefix("firn");
    registry.register_collector(Box::new(FigureCollector(figures)));
    let mut text = String::new();
    prometheus_text::encode(&mut text, &registry).expect("a string takes all text");
    text
}

impl Collector for FigureCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        self.0
            .iter()
            .filter(|figure| !figure.samples.is_empty())
            .try_for_each(|figure| encode_metric(figure, &mut encoder))
    }
}

/// Writes one metric (`figure`) in the Prometheus text format: its name and help, and then all of its samples. Whole
/// numbers are written without a decimal point.
fn encode_metric(figure: &Figure, encoder: &mut DescriptorEncoder) -> fmt::Result {
    let kind = match figure.kind {
        Kind::Counter => MetricType::Counter,
        Kind::Gauge => MetricType::Gauge,
        Kind::Histogram => MetricType::Histogram,
    };
    let mut family = encoder.encode_descriptor(&figure.name, &figure.help, None, kind)?;
    for Sample { labels, value } in &figure.samples {
        let mut sample = family.encode_family(labels)?;
        match value {
            Value::Number(number) if figure.kind == Kind::Counter => {
                match as_whole_number(*number) {
                    Some(integer) => sample.encode_counter(&integer, NO_EXEMPLAR)?,
                    None => sample.encode_counter(number, NO_EXEMPLAR)?,
                }
            }
            Value::Number(number) => match as_whole_number(*number) {
                Some(integer) => sample.encode_gauge(&integer)?,
                None => sample.encode_gauge(number)?,
            },
            Value::Histogram(histogram) => {
                // Each bucket counts the values of one range. The encoder makes cumulative counts of them.
                let buckets: Vec<(f64, u64)> = histogram.buckets().collect();
                sample.encode_histogram(
                    histogram.sum,
                    histogram.count(),
                    &buckets,
                    NO_BUCKET_EXEMPLARS,
                )?;
            }
        }
    }
    Ok(())
}

/// Returns a value without a fraction as an integer, so that it is written without a decimal point.
fn as_whole_number(value: f64) -> Option<u64> {
    let is_whole = value.fract() == 0.0 && value >= 0.0;
    is_whole.then_some(value as u64)
}

/// Firn's samples refer to no traces (exemplars).
const NO_EXEMPLAR: Option<&Exemplar<NoLabelSet, f64>> = None;
const NO_BUCKET_EXEMPLARS: Option<&HashMap<usize, Exemplar<NoLabelSet, f64>>> = None;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use firn_protocol::{LaneState, TokenState};
    use serde_json::Value;

    use super::{MountScrape, Scrape, Status};

    fn text(all: &[Status]) -> String {
        let all: Vec<MountScrape> = all
            .iter()
            .map(|status| MountScrape::Up(Box::new(status.clone())))
            .collect();
        super::text(&all)
    }

    fn another() -> Status {
        Status {
            mount_point: "/b".into(),
            ..Status::example()
        }
    }

    /// Gives each number of a status a unique value, and adds its path and value to `found`. The example must contain
    /// every number.
    fn mark_numbers(value: &mut Value, path: &str, next: &mut u64, found: &mut Vec<(String, u64)>) {
        match value {
            Value::Object(fields) => {
                assert!(!fields.is_empty(), "the example has nothing in {path}");
                for (name, field) in fields {
                    mark_numbers(field, &format!("{path}.{name}"), next, found);
                }
            }
            Value::Array(items) => {
                assert!(!items.is_empty(), "the example has nothing in {path}");
                for item in items {
                    mark_numbers(item, path, next, found);
                }
            }
            // Metrics have these as cumulative counts: `a_histogram_has_its_buckets_its_sum_and_its_count`.
            Value::Number(_) if path.ends_with(".counts") => {}
            // As a label, a whole number is written with `.0`.
            Value::Number(_) if path.ends_with(".bounds") => {}
            Value::Number(_) => {
                *next += 1;
                *value = (*next).into();
                found.push((path.to_owned(), *next));
            }
            Value::Null => panic!("the example leaves {path} out"),
            Value::Bool(_) | Value::String(_) => {}
        }
    }

    /// Numbers that identify something, and that are no measured values.
    const NAMES: [&str; 4] = [
        ".pid",
        ".transactions.id",
        ".transactions.owner.pid",
        ".waiting_programs.thread",
    ];

    /// Proves S-seen-5: a figure that is new in the status cannot be forgotten here.
    #[test]
    fn every_number_of_the_status_is_a_metric() {
        let mut json = serde_json::to_value(Status::example()).unwrap();
        let mut numbers = Vec::new();
        mark_numbers(&mut json, "", &mut 1_000_000, &mut numbers);
        let status: Status = serde_json::from_value(json).unwrap();
        let text = text(&[status]);
        assert!(numbers.len() > 80, "{numbers:?}");
        for (path, number) in numbers {
            let is_value = |line: &str| {
                line.ends_with(&format!(" {number}")) || line.ends_with(&format!(" {number}.0"))
            };
            let is_label = text.contains(&format!("=\"{number}\""));
            assert!(
                text.lines().any(is_value) || is_label || NAMES.contains(&path.as_str()),
                "{path} of `firn status --json` is not in `--prometheus`: {text}"
            );
        }
    }

    /// Proves S-seen-5.
    #[test]
    fn every_yes_or_no_and_every_state_is_a_metric() {
        let mut status = Status::example();
        let before = text(&[status.clone()]);
        let mut json = serde_json::to_value(&status).unwrap();
        let mut flags = Vec::new();
        each_flag(&mut json, "", &mut |path, flag| {
            flags.push(path.to_owned());
            *flag = !*flag;
        });
        assert!(flags.len() > 5, "{flags:?}");
        for flag in flags
            .iter()
            .filter(|flag| *flag != ".transactions.owner.connection")
        {
            let mut json = serde_json::to_value(&status).unwrap();
            each_flag(&mut json, "", &mut |path, value| {
                *value ^= path == flag;
            });
            let changed = text(&[serde_json::from_value(json).unwrap()]);
            assert_ne!(changed, before, "{flag}");
        }
        status.lanes[0].placed.as_mut().unwrap().state = LaneState::Gone;
        status.lanes[0].token.as_mut().unwrap().state = TokenState::Without;
        let text = text(&[status]);
        for (state, labels, value) in [
            ("placed_state", r#"lane="0",path="",state="gone""#, 1),
            ("placed_state", r#"lane="0",path="",state="ok""#, 0),
            ("token_state", r#"lane="0",path="",state="without""#, 1),
        ] {
            let common = r#"backing="",mount_point="/a\"b\\\\c\\nd",host="""#;
            let line = format!("firn_lane_{state}{{{common},{labels}}} {value}");
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
    }

    fn each_flag(value: &mut Value, path: &str, visit: &mut dyn FnMut(&str, &mut bool)) {
        match value {
            Value::Object(fields) => {
                for (name, field) in fields {
                    each_flag(field, &format!("{path}.{name}"), visit);
                }
            }
            Value::Array(items) => items
                .iter_mut()
                .for_each(|item| each_flag(item, path, visit)),
            Value::Bool(flag) => visit(path, flag),
            _ => {}
        }
    }

    #[test]
    fn a_histogram_has_its_buckets_its_sum_and_its_count() {
        let text = text(&[another()]);
        let family: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("firn_write_seconds"))
            .collect();
        let expected = [
            ("_sum{", "", " 12.0"),
            ("_count{", "", " 6"),
            ("_bucket{", "le=\"1\"", " 1"),
            ("_bucket{", "le=\"2\"", " 3"),
            ("_bucket{", "le=\"+Inf\"", " 6"),
        ];
        assert_eq!(family.len(), expected.len(), "{family:?}");
        for (name, label, value) in expected {
            let is_it = |line: &&str| {
                line.starts_with(&format!("firn_write_seconds{name}"))
                    && line.contains(label)
                    && line.contains("mount_point=\"/b\"")
                    && line.ends_with(value)
            };
            assert!(
                family.iter().any(is_it),
                "{name} {label} {value}: {family:?}"
            );
        }
        assert!(text.contains("# TYPE firn_write_seconds histogram\n"));
    }

    #[test]
    fn a_mount_that_does_not_answer_is_down_and_has_no_other_figures() {
        let down = Scrape {
            mount_point: "/gone".into(),
            ..Scrape::default()
        };
        let all = [
            MountScrape::Up(Box::new(another())),
            MountScrape::Down(down),
        ];
        let text = super::text(&all);
        let up = |mount_point: &str, value| {
            format!("firn_up{{backing=\"\",mount_point=\"{mount_point}\",host=\"\"}} {value}")
        };
        for line in [up("/b", 1), up("/gone", 0)] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        assert_eq!(text.matches("/gone").count(), 1, "{text}");
    }

    #[test]
    fn samples_of_two_mounts_stand_under_one_head() {
        let text = text(&[Status::example(), another()]);
        let head = "# HELP firn_failed_requests_total Failed requests of the kernel, by operation; lookups of missing \
                    names count too.\n# TYPE firn_failed_requests_total counter\n";
        let sample = |mount_point: &str| {
            format!(
                "firn_failed_requests_total{{backing=\"\",mount_point=\"{mount_point}\",host=\"\",kind=\"lookup\"}} 3\n"
            )
        };
        let family = format!("{head}{}{}", sample(r#"/a\"b\\\\c\\nd"#), sample("/b"));
        assert!(text.contains(&family), "{family}: {text}");
    }

    /// The rules of `promtool check metrics`. Each family has one head before all of its samples. Names and labels have
    /// valid characters, and no sample occurs twice. Counters are declared as such.
    #[test]
    fn the_text_is_as_collectors_read_it() {
        let text = text(&[Status::example(), another()]);
        let is_name = |name: &str| {
            name.bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
        };
        let mut families = BTreeSet::new();
        let mut samples = BTreeSet::new();
        let mut lines = text.lines().peekable();
        while let Some(line) = lines.next() {
            let (name, help) = line
                .strip_prefix("# HELP ")
                .and_then(|rest| rest.split_once(' '))
                .unwrap_or_else(|| panic!("no head: {line}"));
            assert!(name.starts_with("firn_") && is_name(name), "{line}");
            assert!(help.ends_with('.') && !help.contains('\\'), "{line}");
            assert!(families.insert(name), "{name} twice");
            let kind = lines.next().and_then(|line| line.strip_prefix("# TYPE "));
            let (typed, kind) = kind.and_then(|rest| rest.split_once(' ')).expect("a type");
            assert_eq!(typed, name);
            assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{kind}");
            let mut count = 0;
            while let Some(line) = lines.next_if(|line| !line.starts_with('#')) {
                let rest = line.strip_prefix(name).expect("a sample of its family");
                let (part, _) = rest.split_once('{').expect("labels");
                assert!(part.is_empty() || kind == "histogram", "{line}");
                let rest = &rest[part.len()..];
                let (labels, value) = rest.rsplit_once(' ').expect("a value");
                assert!(value.parse::<f64>().is_ok(), "{line}");
                assert!(samples.insert((name, part, labels)), "{line} twice");
                let labels = labels
                    .strip_prefix('{')
                    .and_then(|rest| rest.strip_suffix('}'));
                let mut left = labels.expect("labels in braces");
                while !left.is_empty() {
                    let (key, rest) = left.split_once("=\"").expect("a value in quotes");
                    assert!(is_name(key), "{line}");
                    let end = end_of_label(rest).expect("its end");
                    left = rest[end + 1..].trim_start_matches(',');
                }
                count += 1;
            }
            assert!(count > 0, "{name} has no samples");
        }
        assert!(families.len() > 80, "{}", families.len());
    }

    /// Returns the index of the quote that ends the value of a label.
    fn end_of_label(text: &str) -> Option<usize> {
        let mut is_escaped = false;
        text.bytes().position(|byte| {
            let is_end = byte == b'"' && !is_escaped;
            is_escaped = byte == b'\\' && !is_escaped;
            is_end
        })
    }
}
