//! The tiny programs of `guests/`, one kernel feature each, moved in every way there is.
//!
//! `PROGRAM OUTFILE` writes `step N ok` round after round and `PASS` in the end. Whatever is done
//! to it in the middle, that file and exit status 0 must come out.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::Lab;
use crate::clock::Instant;
use crate::dice::Dice;
use crate::lab::{Host, LabError, Process};
use crate::programs::WORK_DIR;
use crate::protected::{Engine, Event, HANG, event};

/// What is done to a guest while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// Nothing; no Hotspare either.
    Plain,
    /// Its host dies when the first checkpoint is committed, and no other is.
    CaptureRestore,
    /// Its host dies after 50 increments.
    Increments,
    /// Its host dies at any instant.
    Failover,
    /// It is moved, as planned.
    Switchover,
}

impl Mode {
    /// Every mode, in the order of the table.
    pub const ALL: [Mode; 5] =
        [Mode::Plain, Mode::CaptureRestore, Mode::Increments, Mode::Failover, Mode::Switchover];

    /// As `guests/list.toml` calls it.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Plain => "plain",
            Mode::CaptureRestore => "capture-restore",
            Mode::Increments => "increments",
            Mode::Failover => "failover",
            Mode::Switchover => "switchover",
        }
    }

    /// The mode with this name.
    pub fn by_name(name: &str) -> Option<Mode> {
        Mode::ALL.into_iter().find(|mode| mode.name() == name)
    }

    fn epoch(self) -> Duration {
        match self {
            Mode::Plain | Mode::CaptureRestore => Duration::from_secs(3600),
            Mode::Increments => Duration::from_millis(20),
            Mode::Failover | Mode::Switchover => Duration::from_millis(50),
        }
    }
}

/// One program of `guests/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guest {
    /// Its name in the build directory.
    pub name: String,
    /// Modes that it cannot run in, and why.
    pub unsupported: Vec<(Mode, String)>,
}

/// Reads `guests/list.toml`, as `guests/describe` writes it: one `key = value` a line.
pub fn read_list(text: &str) -> Vec<Guest> {
    let mut guests: Vec<Guest> = Vec::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("name = ") {
            let name = name.trim_matches('"').to_owned();
            guests.push(Guest { name, unsupported: Vec::new() });
        }
        let Some(refused) = line.strip_prefix("unsupported = ") else { continue };
        for refusal in refused.split("{ mode = \"").skip(1) {
            let (mode, rest) = refusal.split_once('"').unwrap_or_default();
            let why = rest.split('"').nth(1).unwrap_or_default().to_owned();
            if let (Some(mode), Some(guest)) = (Mode::by_name(mode), guests.last_mut()) {
                guest.unsupported.push((mode, why));
            }
        }
    }
    guests
}

/// How guests are run.
#[derive(Clone, Debug)]
pub struct Conditions {
    /// The directory of built guests.
    pub build: PathBuf,
    /// The `hotspare` program; not needed for [`Mode::Plain`].
    pub hotspare: Option<PathBuf>,
    /// Rounds.
    pub steps: u32,
    /// Length of a round.
    pub step_ms: u32,
}

impl Conditions {
    fn length(&self) -> Duration {
        Duration::from_millis(u64::from(self.steps) * u64::from(self.step_ms))
    }

    /// For 50 checkpoints a guest has to live longer, where much else runs.
    fn of(&self, mode: Mode) -> Self {
        self.longer(if mode == Mode::Increments { 3 } else { 1 })
    }

    fn longer(&self, times: u32) -> Self {
        Self { step_ms: self.step_ms * times, ..self.clone() }
    }

    fn expected(&self) -> String {
        let steps: String = (1..=self.steps).map(|step| format!("step {step} ok\n")).collect();
        steps + "PASS\n"
    }

    fn command(&self, guest: &Guest) -> Vec<String> {
        let program = self.build.join(&guest.name);
        vec![
            "env".to_owned(),
            format!("GUEST_STEPS={}", self.steps),
            format!("GUEST_STEP_MS={}", self.step_ms),
            program.to_string_lossy().into_owned(),
            format!("{WORK_DIR}/out"),
        ]
    }
}

/// What came of a guest.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// What was wrong, if anything was.
    pub wrong: Option<String>,
    /// How often its life was over, and good, before it could be moved. The next one was twice as
    /// long each time.
    pub too_short: u32,
}

/// Runs one guest once, in a life that is long enough for `mode`.
pub fn run(
    guest: &Guest,
    mode: Mode,
    conditions: &Conditions,
    seed: u64,
) -> Result<Outcome, LabError> {
    const LIVES: u32 = 6;
    let conditions = conditions.of(mode);
    for too_short in 0..LIVES {
        let life = conditions.longer(1 << too_short);
        match live(guest, mode, &life, seed)? {
            Verdict::Right => return Ok(Outcome { wrong: None, too_short }),
            Verdict::Wrong(wrong) => return Ok(Outcome { wrong: Some(wrong), too_short }),
            Verdict::TooShort => {}
        }
    }
    let wrong = Some(format!("it ended before it could be moved, in each of {LIVES} lives"));
    Ok(Outcome { wrong, too_short: LIVES })
}

/// What is to be said of one life of a guest.
enum Verdict {
    Right,
    Wrong(String),
    TooShort,
}

fn live(
    guest: &Guest,
    mode: Mode,
    conditions: &Conditions,
    seed: u64,
) -> Result<Verdict, LabError> {
    let lab = Lab::new(2)?;
    for host in lab.hosts() {
        let work = host.outside(WORK_DIR);
        let made = fs::create_dir_all(&work);
        made.map_err(|source| LabError::Io { doing: format!("make {}", work.display()), source })?;
    }
    let command = conditions.command(guest);
    let ended = match (mode, &conditions.hotspare) {
        (Mode::Plain, _) => Some(plainly(&lab, &command, conditions)?),
        (_, Some(binary)) => moved(&lab, mode, &command, conditions, (binary, seed))?,
        (_, None) => {
            let missing = "there is no hotspare program: build it first";
            return Ok(Verdict::Wrong(missing.to_owned()));
        }
    };
    let was_over = ended.is_none();
    let (status, host, said) = ended.unwrap_or_else(|| (0, lab.host(0), String::new()));
    let found = host.inside(|| fs::read_to_string(Path::new(WORK_DIR).join("out")));
    let found = found.unwrap_or_else(|error| error.to_string());
    Ok(if status != 0 || found != conditions.expected() {
        let wrote = tail(&found);
        Verdict::Wrong(format!("exit status {status}; wrote:\n{wrote}\nsaid:\n{said}"))
    } else if was_over {
        Verdict::TooShort
    } else {
        Verdict::Right
    })
}

/// The last lines.
fn tail(text: &str) -> String {
    const LINES: usize = 8;
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

type Ended<'a> = (i32, &'a Host, String);

/// In namespaces like those that Hotspare gives, but without it.
const PLAIN: &str = "ip link set lo up && mount --bind \"$0\" \"$0\" && \
                     mount -o remount,bind,ro / && \"$@\" </dev/null; exit $?";

fn plainly<'a>(
    lab: &'a Lab,
    command: &[String],
    conditions: &Conditions,
) -> Result<Ended<'a>, LabError> {
    let host = lab.host(0);
    let mut unshare = Command::new("unshare");
    unshare.args(["--pid", "--fork", "--kill-child", "--mount-proc", "--ipc", "--uts", "--net"]);
    unshare.args(["sh", "-c", PLAIN, WORK_DIR]).args(command);
    let process = host.spawn(&mut unshare)?;
    let status = process.wait(conditions.length() + HANG)?.code().unwrap_or(-1);
    Ok((status, host, tail(&process.stderr().text())))
}

/// How long an agent may take to end when its guest could not be moved.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// `None` if it came to its good end by itself before it was moved.
fn moved<'a>(
    lab: &'a Lab,
    mode: Mode,
    command: &[String],
    conditions: &Conditions,
    (binary, seed): (&Path, u64),
) -> Result<Option<Ended<'a>>, LabError> {
    let engine = Engine {
        binary: binary.to_owned(),
        epoch: mode.epoch(),
        service_cidr: None,
        replicated: vec![WORK_DIR.to_owned()],
        more: vec![],
    }
    .patient();
    let spare = engine.patient_spare(lab.host(1))?;
    let end = Instant::now() + conditions.length();
    let primary = engine.run(lab.host(0), &[lab.host(1)], command)?;
    let moved = wait_for_instant(mode, &primary, end, seed).and_then(|()| {
        wait_for_ghost(lab.host(0), binary, &primary)?;
        if mode == Mode::Switchover && primary.try_wait().is_none() {
            let mut switchover = Command::new(binary);
            return lab.host(0).run(switchover.arg("switchover"), HANG).map(drop);
        }
        // Its pipes are read to the end: what it has said by then is known below.
        lab.host(0).kill().and_then(|_| primary.wait(HANG).map(drop))
    });
    if moved.is_err() {
        // A guest that is over is the usual reason, and its agent about to say so.
        let _ = primary.wait(LAST_WORDS);
    }
    if Engine::is_over(&primary) {
        return Ok(None);
    }
    if let Err(error) = moved {
        let (primary, spare) = (tail(&primary.said()), tail(&spare.said()));
        let said = format!("{error}\nthe primary said:\n{primary}\nthe spare said:\n{spare}");
        return Ok(Some((-1, lab.host(0), said)));
    }
    let Some(status) = ended_on(&spare, conditions.length() + HANG)? else { return Ok(None) };
    Ok(Some((status, lab.host(1), tail(&spare.stderr().text()))))
}

/// Waits for the end of the guest on the new primary. `None` if it has ended on the old one, which
/// could tell the spare and nobody else any more.
fn ended_on(spare: &Process, at_most: Duration) -> Result<Option<i32>, LabError> {
    let deadline = Instant::now() + at_most;
    while Instant::now() < deadline {
        if spare.stderr().text().contains("the primary is done: the guest has ended") {
            return Ok(None);
        }
        if let Ok(status) = Engine::guest_ended(spare, Duration::from_millis(100)) {
            return Ok(Some(status));
        }
    }
    Engine::guest_ended(spare, Duration::ZERO).map(Some)
}

/// Waits until it is time to move the guest of `primary`, which will end at `end`; or it has ended.
fn wait_for_instant(
    mode: Mode,
    primary: &Process,
    end: Instant,
    seed: u64,
) -> Result<(), LabError> {
    Engine::protected(primary)?;
    match mode {
        Mode::Plain | Mode::CaptureRestore => Ok(()),
        Mode::Increments => wait_for_increments(primary),
        Mode::Failover | Mode::Switchover => {
            // In the first half of what is left of its life, however long protection has taken.
            let left = end.since(Instant::now());
            let wait = Dice::new(seed).between(Duration::ZERO, left / 2);
            (Instant::now() + wait).sleep_until();
            Ok(())
        }
    }
}

/// Until some spare has a whole ghost, or the guest has ended. Some changes of the process tree
/// need a new one.
fn wait_for_ghost(host: &Host, binary: &Path, primary: &Process) -> Result<(), LabError> {
    let deadline = Instant::now() + HANG;
    while Engine::status(host, binary, "ready") == Some(0) && primary.try_wait().is_none() {
        if Instant::now() > deadline {
            return Err(LabError::Deadline { what: "a ghost".to_owned(), waited: HANG });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Until there were 50, or the guest has ended.
fn wait_for_increments(primary: &Process) -> Result<(), LabError> {
    const WANTED: u64 = 51;
    let reached = |line: &crate::lab::Line| match event(line)? {
        Event::Epoch { epoch, .. } | Event::Protected { epoch } => {
            (epoch >= WANTED).then_some(true)
        }
        Event::Exit { .. } => Some(false),
        Event::Failover(_) => None,
    };
    match primary.stdout().find(HANG, reached) {
        Some(true) => Ok(()),
        Some(false) => primary.wait(HANG).map(drop),
        None => Err(LabError::Deadline { what: format!("epoch {WANTED}"), waited: HANG }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_names_guests_and_what_they_cannot() {
        let list = "# comment\n\n[[guest]]\nname = \"a\"\nunsupported = []\n\n[[guest]]\n\
                    name = \"b_static\"\nfeature = \"x\"\nunsupported = [{ mode = \"increments\", \
                    why = \"is too short\" }, { mode = \"switchover\", why = \"no\" }]\n";
        let guests = read_list(list);
        assert_eq!(guests[0], Guest { name: "a".to_owned(), unsupported: vec![] });
        let unsupported = vec![
            (Mode::Increments, "is too short".to_owned()),
            (Mode::Switchover, "no".to_owned()),
        ];
        assert_eq!(guests[1], Guest { name: "b_static".to_owned(), unsupported });
    }
}
