//! `firn exporter`: serves the metrics of all mounts to collectors over HTTP, or writes them to a text file at
//! intervals.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Arg, ArgMatches, Command, ValueHint, value_parser};

use crate::exporter::{Address, EndSignal, Listener, Scraper, serve};
use crate::failure::{DONE, FAILED, Failure};
use crate::verb::Verb;
use crate::{output, output_file, text};

/// Address that only programs on this host can reach.
const DEFAULT_ADDRESS: &str = "127.0.0.1:9945";
/// Interval at which the text file is written.
const WRITE_INTERVAL: Duration = Duration::from_secs(15);

pub const VERB: Verb = Verb {
    name: "exporter",
    about: "Serve the metrics of all mounts to Prometheus",
    long: "Answers GET /metrics with the figures of all mounts on this host that the user may ask: for root all mounts, \
           for other users their own. A mount whose firnd does not answer within 2 seconds has `firn_up 0`. Sockets \
           that systemd passes (LISTEN_FDS) replace --listen. With --textfile, opens no socket, and writes the metrics \
           to a file every 15 seconds, for node_exporter. docs/METRICS.md lists the metrics; examples/monitoring has \
           alert rules and a dashboard. SIGTERM ends the exporter.",
    examples: &[
        ("firn exporter", "at http://127.0.0.1:9945/metrics"),
        (
            "firn exporter --listen '[::]:9945'",
            "for collectors on other hosts, too",
        ),
        (
            "firn exporter --listen unix:/run/firn/metrics.sock",
            "at a Unix socket",
        ),
        (
            "firn exporter --textfile /var/lib/prometheus/node-exporter/firn.prom",
            "for the textfile collector of node_exporter",
        ),
    ],
    exits: &[
        (0, "ended by SIGTERM or Ctrl-C"),
        (1, "it cannot listen, or cannot write the file"),
    ],
    args,
    run,
};

/// Adds the arguments of `firn exporter` to its clap command, and returns the command.
fn args(command: Command) -> Command {
    command
        .arg(
            Arg::new("listen")
                .long("listen")
                .value_name("ADDR")
                .help("ADDRESS:PORT, [ADDRESS]:PORT or unix:PATH")
                .default_value(DEFAULT_ADDRESS)
                .value_parser(|text: &str| text.parse::<Address>()),
        )
        .arg(
            Arg::new("textfile")
                .long("textfile")
                .value_name("FILE")
                .help("Instead of listening, write the metrics to FILE every 15 s; each write replaces FILE atomically")
                .value_hint(ValueHint::FilePath)
                .conflicts_with("listen")
                .value_parser(value_parser!(PathBuf)),
        )
}

/// Serves metrics until a signal comes. With `--textfile` it writes the file at intervals instead. Sockets that systemd
/// passes replace `--listen`.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let end_signal = EndSignal::on_signals()?;
    if let Some(file) = matches.get_one::<PathBuf>("textfile") {
        return write_at_intervals(file, &end_signal);
    }
    let mut listeners = Listener::from_systemd()?;
    if listeners.is_empty() {
        let address = matches
            .get_one::<Address>("listen")
            .expect("it has a default");
        listeners.push(Listener::bind(address)?);
    }
    for listener in &listeners {
        output::print_message(&format!("metrics are at {}", listener.shown_address()));
    }
    serve(&listeners, &end_signal)?;
    Ok(DONE)
}

/// Writes the metrics to a file at intervals until a signal comes.
fn write_at_intervals(file: &Path, end_signal: &EndSignal) -> Result<u8, Failure> {
    let scraper = Scraper::default();
    loop {
        let metrics = scraper.metrics_text()?;
        output_file::write(file, metrics.as_bytes()).map_err(|error| {
            let file = text::path(file);
            Failure::new(FAILED, format!("cannot write {file}: {error}"))
        })?;
        if end_signal.wait(WRITE_INTERVAL)? {
            return Ok(DONE);
        }
    }
}
