//! `cargo xtask bench restart`: FREM's tables, over the road that users take: `hotspare run
//! --store`, the death of its host, `hotspare restore` on another one at the end of a line.

mod line;
mod programs;

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hotspare_torture::lab::{Host, LAB_DIR, Lab, Process};
use nix::sys::signal::Signal;
use serde::Serialize;
use serde_json::{Value, json};

use self::line::Line;
use self::programs::{Program, Workshop};
use super::against::{Case, Figures, compare};
use super::plot::{Axis, Curve, Panel, Plot};
use super::report::{Common, Report, Table, wrapped};
use crate::tree;

/// The store's place below what the line serves.
const PLACE: &str = "p";
const PATIENCE: Duration = Duration::from_secs(300);
/// When a restored guest starts.
const STARTS: [(&str, &[&str]); 4] = [
    ("loaded", &["--load-first"]),
    ("touched", &["--start", "touched"]),
    ("smooth", &["--start", "smooth"]),
    ("early", &["--start", "early"]),
];

#[derive(Debug, Args)]
pub struct RestartArguments {
    #[command(flatten)]
    common: Common,
    /// Programs; all if none is given
    #[arg(long, value_delimiter = ',')]
    programs: Vec<String>,
    /// Lines: megabytes a second, and milliseconds of a round trip
    #[arg(long, value_delimiter = ',', default_value = "32:70,7:200")]
    lines: Vec<String>,
    /// Seconds that a program has run before its last checkpoint
    #[arg(long, default_value_t = 12)]
    warm: u64,
    /// Restarts of each kind; the medians are shown
    #[arg(long, default_value_t = 1)]
    count: usize,
}

/// Megabytes a second, and the round trip.
type Speed = (u64, Duration);

impl RestartArguments {
    pub fn with(common: Common) -> RestartArguments {
        let lines = ["32:70", "7:200"].map(str::to_owned).into();
        RestartArguments { common, programs: vec![], lines, warm: 12, count: 1 }
    }

    fn wants(&self, name: &str) -> bool {
        match self.common.quick {
            true => name == "perl",
            false => self.programs.is_empty() || self.programs.iter().any(|wanted| wanted == name),
        }
    }

    fn chosen(&self) -> Result<Vec<Program>> {
        let workshop = Workshop::open(|name| self.wants(name))?;
        let programs = workshop.programs().into_iter();
        let chosen: Vec<Program> = programs.filter(|program| self.wants(program.name)).collect();
        ensure!(!chosen.is_empty(), "there is no program {:?}", self.programs);
        Ok(chosen)
    }

    fn speeds(&self) -> Result<Vec<Speed>> {
        if self.common.quick {
            return Ok(vec![(200, Duration::from_millis(1))]);
        }
        let speed = |line: &String| {
            let (rate, delay) = line.split_once(':').context("a line is written 32:70")?;
            Ok((rate.parse()?, Duration::from_millis(delay.parse()?)))
        };
        self.lines.iter().map(speed).collect()
    }

    fn record(&self, hotspare: &Path, program: &Program) -> Result<Recorded> {
        let (warm, track) = if self.common.quick { (1, "1s") } else { (self.warm, "5s") };
        Recorded::make(hotspare, program, Duration::from_secs(warm), track)
    }
}

/// How one restart went.
#[derive(Clone, Debug, Default, Serialize)]
struct Restart {
    latency_s: f64,
    before_mb: f64,
    behind_mb: f64,
    behind_s: f64,
    waited_s: f64,
    unforeseen: u64,
    requests: u64,
}

const COLUMNS: [&str; 13] = [
    "program",
    "image MB",
    "all first s",
    "touch set first MB",
    "s",
    "smooth s",
    "early MB",
    "s",
    "saved",
    "came behind s",
    "waited for s",
    "unforeseen pages",
    "requests",
];

/// Stores, kills and restores each program, and shows what it took.
pub fn restarts(arguments: &RestartArguments) -> Result<()> {
    let (programs, speeds) = (arguments.chosen()?, arguments.speeds()?);
    if let Some(rev) = &arguments.common.against {
        let cases = cases(arguments, &programs, &speeds);
        return compare("restart", &arguments.common, rev, &cases);
    }
    let hotspare = tree::build_hotspare()?;
    let mut report = Report::new("restart", &arguments.common)?;
    let mut recorded = Vec::new();
    for program in &programs {
        recorded.push(arguments.record(&hotspare, program)?);
    }
    let mut text = wrapped(ABOUT);
    let mut panels = Vec::new();
    for speed in speeds {
        let (rate, delay_ms) = (speed.0, speed.1.as_millis() as u64);
        let named = format!("{rate} MB/s, {delay_ms} ms");
        println!("\n{named}:\n");
        let mut table = Table::new(&COLUMNS);
        let mut all = Vec::new();
        for recorded in &recorded {
            let mut went = Vec::new();
            for (start, how) in STARTS {
                let restart = recorded.restarts(how, speed, arguments.count)?;
                let of = json!({ "program": recorded.name, "start": start, "mb_per_s": rate,
                    "round_trip_ms": delay_ms });
                report.add(of, &restart)?;
                went.push(restart);
            }
            let saved = row(&mut table, recorded.name, &went);
            all.push((recorded.name, went, saved));
        }
        let mean = all.iter().map(|one| one.2).sum::<f64>() / all.len() as f64;
        let mean = format!("On average {mean:.0} % less than with everything first.");
        println!("\n{mean}");
        text += &format!("\n{named}:\n\n{}\n{mean}\n", table.text);
        panels.push(panel(&named, &all));
    }
    report.plot(Plot {
        name: "programs".to_owned(),
        title: "How long programs take until they run again".to_owned(),
        about: "from the start of `hotspare restore` on; lines by bandwidth and round trip"
            .to_owned(),
        panels,
    });
    report.finish("restart", &text)
}

/// One place for each program.
fn panel(line: &str, all: &[(&'static str, Vec<Restart>, f64)]) -> Panel {
    let names: Vec<String> = all.iter().map(|one| one.0.to_owned()).collect();
    let points = |start: usize| {
        let places = all.iter().enumerate();
        places.map(|(place, one)| (place as f64, one.1[start].latency_s)).collect()
    };
    let each = STARTS.iter().enumerate();
    let curves =
        each.map(|(start, (name, _))| Curve { name: (*name).to_owned(), points: points(start) });
    let (x, y) = (Axis::names("program", &names), Axis::linear(&format!("{line}: s")));
    Panel { x, y, curves: curves.collect() }
}

/// As `restore` does it without being told how, so that commits from before can be measured.
fn cases<'a>(
    arguments: &'a RestartArguments,
    programs: &'a [Program],
    speeds: &[Speed],
) -> Vec<Case<'a>> {
    let pairs =
        speeds.iter().flat_map(|speed| programs.iter().map(move |program| (*speed, program)));
    let case = |(speed, program): (Speed, &'a Program)| Case {
        name: format!("{}, {} MB/s, {} ms", program.name, speed.0, speed.1.as_millis()),
        measure: Box::new(move |hotspare: &Path| {
            let restart = arguments.record(hotspare, program)?.restart(&[], speed)?;
            Ok(Figures::from([("until it runs s".to_owned(), restart.latency_s)]))
        }),
    };
    pairs.map(case).collect()
}

const ABOUT: &str = "A program runs under `hotspare run --store` for some seconds, its host dies, \
    and `hotspare restore` brings it back on another one that reads the store at the end of a line \
    of that bandwidth and round trip (a server of S3's dialect that delays each answer by a round \
    trip and sends all of them one after another; connections are there at once; what is sent is \
    compressed). Image: private memory of the guest that is not zero. Times are until the program \
    runs, from the start of `restore` on: with everything there (`--load-first`), with the touch \
    set (`--start touched`, as FREM does), with as much as is needed so that, at the measured \
    bandwidth, nothing comes later than it was touched (`smooth`), and with what was touched in \
    the first moments (`early`, what `restore` does). What follows is of `early`; saved is against \
    all first. Waited for: pages that were not there yet, all together, each by whoever came \
    first. Unforeseen: pages that were waited for and not even asked for.";

fn row(table: &mut Table, name: &str, went: &[Restart]) -> f64 {
    let [all, touched, smooth, early] = went else { return 0.0 };
    let saved = 100.0 - 100.0 * early.latency_s / all.latency_s;
    table.row([
        name.to_owned(),
        format!("{:.1}", all.before_mb + all.behind_mb),
        format!("{:.2}", all.latency_s),
        format!("{:.1}", touched.before_mb),
        format!("{:.2}", touched.latency_s),
        format!("{:.2}", smooth.latency_s),
        format!("{:.1}", early.before_mb),
        format!("{:.2}", early.latency_s),
        format!("{saved:.0} %"),
        format!("{:.2}", early.behind_s),
        format!("{:.2}", early.waited_s),
        early.unforeseen.to_string(),
        early.requests.to_string(),
    ]);
    saved
}

/// A program's checkpoints, in a directory.
struct Recorded {
    hotspare: PathBuf,
    name: &'static str,
    lab: Lab,
}

impl Recorded {
    fn make(hotspare: &Path, program: &Program, warm: Duration, track: &str) -> Result<Self> {
        let lab = Lab::new(2)?;
        let store = format!("file://{LAB_DIR}/served/{PLACE}");
        let mut command = Command::new(hotspare);
        command.args(["run", "--json", "--insecure", "--guest", program.name, "--store", &store]);
        command.args(["--store-every", "1s", "--track", track, "--keep", "1h", "--"]);
        command.args(&program.command);
        let primary = lab.host(0).spawn(&mut command)?;
        let deadline = Instant::now() + warm;
        while Instant::now() < deadline {
            if let Some(status) = primary.try_wait() {
                bail!("{} ended with {status}:\n{}", program.name, primary.said());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let served = lab.host(0).outside(format!("{LAB_DIR}/served/{PLACE}/{}", program.name));
        let deadline = Instant::now() + PATIENCE;
        while !served.join("touched").exists() {
            if Instant::now() > deadline {
                bail!("nothing is known of what {} touches:\n{}", program.name, primary.said());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        kill(&primary)?;
        Ok(Self { hotspare: hotspare.to_owned(), name: program.name, lab })
    }

    /// The median of some restarts, by latency.
    fn restarts(&self, how: &[&str], line: Speed, count: usize) -> Result<Restart> {
        let went = (0..count.max(1)).map(|_| self.restart(how, line));
        let mut went = went.collect::<Result<Vec<_>>>()?;
        went.sort_by(|a, b| a.latency_s.total_cmp(&b.latency_s));
        Ok(went.swap_remove(went.len() / 2))
    }

    fn restart(&self, how: &[&str], (rate, delay): Speed) -> Result<Restart> {
        let (host, line) = (self.lab.host(1), Arc::new(Line::new(rate, delay)));
        let served = self.lab.host(0).outside(format!("{LAB_DIR}/served"));
        let listener = host.inside(|| TcpListener::bind(("127.0.0.1", 0)))?;
        let port = listener.local_addr()?.port();
        let answers = line.clone();
        std::thread::spawn(move || line::serve(&listener, &served, &answers));
        let from = format!("s3://b/{PLACE}?endpoint=http://127.0.0.1:{port}&region=us-east-1");
        let mut command = Command::new(&self.hotspare);
        command.env("AWS_ACCESS_KEY_ID", "x").env("AWS_SECRET_ACCESS_KEY", "x");
        command.args(["restore", "--json", "--insecure"]).args(how).args([&from, self.name]);
        let restored = host.spawn(&mut command)?;
        let started = told(host, &restored, "restored")?;
        let loaded = told(host, &restored, "loaded")?;
        kill(&restored)?;
        let number = |told: &Value, name: &str| told[name].as_f64().unwrap_or_default();
        let megabytes = |bytes: f64| bytes / f64::from(1 << 20);
        let latency_s = number(&started, "took_ms") / 1e3;
        let seconds = number(&loaded, "seconds");
        Ok(Restart {
            latency_s,
            before_mb: megabytes(number(&loaded, "bytes_before")),
            behind_mb: megabytes(number(&loaded, "bytes_behind")),
            behind_s: seconds - number(&loaded, "before_seconds"),
            waited_s: number(&loaded, "waited_seconds"),
            unforeseen: loaded["unforeseen"].as_u64().unwrap_or_default(),
            requests: line.requests.load(Ordering::Relaxed),
        })
    }
}

/// Waits until the agent says so.
fn told(host: &Host, process: &Process, event: &str) -> Result<Value> {
    let found = process.stdout().find(PATIENCE, |line| {
        let told = serde_json::from_str::<Value>(&line.text).ok()?;
        (told["event"] == event).then_some(told)
    });
    found.with_context(|| format!("{}: no {event}:\n{}", host.name(), process.said()))
}

fn kill(process: &Process) -> Result<()> {
    process.signal(Signal::SIGKILL)?;
    process.wait(PATIENCE)?;
    Ok(())
}
