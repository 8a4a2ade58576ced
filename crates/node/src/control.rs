//! The control socket: one line in, one line of JSON out.
//!
//! Each agent listens on `/run/hotspare/PID.sock`, which only root can open. It knows `status` and
//! `switchover`, which is answered when its outcome is known.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::{Value, json};

use crate::agent::{Agent, Message};
use crate::switchover::Asker;

const DIRECTORY: &str = "/run/hotspare";
/// How long a client may take to ask, and an agent to answer what needs no waiting.
const PATIENCE: Duration = Duration::from_secs(5);
/// Exit status of a switchover that came to nothing.
const NOT_MOVED: u8 = 1;

/// Answers on the control socket for as long as the program lives.
pub fn serve(agent: &Agent) -> anyhow::Result<()> {
    std::fs::create_dir_all(DIRECTORY).with_context(|| format!("make {DIRECTORY}"))?;
    let path = PathBuf::from(format!("{DIRECTORY}/{}.sock", std::process::id()));
    // It gets its name when it listens: before, it would look as if left behind.
    let unnamed = path.with_extension("new");
    let _ = std::fs::remove_file(&unnamed);
    let listener = UnixListener::bind(&unnamed)
        .and_then(|listener| std::fs::rename(&unnamed, &path).map(|()| listener))
        .with_context(|| format!("listen on {}", path.display()))?;
    let agent = agent.clone();
    std::thread::Builder::new().name("control".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            // A switchover takes a while, and `status` is wanted meanwhile.
            let agent = agent.clone();
            // A client that goes away in the middle is its own affair.
            let serve = move || drop(answer(&agent, stream));
            let _ = std::thread::Builder::new().name("control".into()).spawn(serve);
        }
    })?;
    Ok(())
}

fn answer(agent: &Agent, stream: UnixStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line)?;
    let answer = match line.trim() {
        "status" => agent.status(),
        "switchover" => return switch(agent, &stream),
        other => json!({"error": format!("unknown request {other:?}")}),
    };
    writeln!(&stream, "{answer}")
}

/// Asks for a switchover, waits for its outcome, and passes that on.
fn switch(agent: &Agent, mut stream: &UnixStream) -> std::io::Result<()> {
    let (asker, asked) = Asker::new();
    agent.owner.send(Message::Switchover(asker));
    let answer = match asked.outcome.recv() {
        Ok(Ok(moved)) => json!({
            "moved": true,
            "stall_ms": moved.stall.as_secs_f64() * 1000.0,
            "epoch": moved.epoch,
        }),
        Ok(Err(why)) => json!({"moved": false, "why": why}),
        Err(_) => json!({"moved": false, "why": "the agent has ended"}),
    };
    let written = writeln!(stream, "{answer}");
    drop(asked.passed_on);
    written
}

/// The agents of this host with their answers to `request`.
fn ask_all(request: &str) -> anyhow::Result<Vec<(PathBuf, Value)>> {
    let mut answers = Vec::new();
    let entries = match std::fs::read_dir(DIRECTORY) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(answers),
        Err(error) => return Err(error).with_context(|| format!("look into {DIRECTORY}")),
    };
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_none_or(|end| end != "sock") {
            continue;
        }
        match UnixStream::connect(&path) {
            Ok(stream) => {
                // Otherwise it has ended just now.
                if let Some(answer) = ask(&stream, request, &path) {
                    answers.push((path, answer));
                }
            }
            // Left behind by an agent that was killed.
            Err(_) if is_gone(&path) => drop(std::fs::remove_file(&path)),
            Err(_) => {}
        }
    }
    Ok(answers)
}

/// Whether the agent that made this socket has ended.
fn is_gone(socket: &Path) -> bool {
    let pid = socket.file_stem().unwrap_or_default();
    !Path::new("/proc").join(pid).exists()
}

/// The answer of the agent behind `path`, if it lives. One that is silent is told of.
fn ask(mut stream: &UnixStream, request: &str, path: &Path) -> Option<Value> {
    let mut line = String::new();
    let asked =
        stream.set_read_timeout(Some(PATIENCE)).and_then(|()| writeln!(stream, "{request}"));
    match asked.and_then(|()| BufReader::new(stream).read_line(&mut line)) {
        Ok(1..) => Some(serde_json::from_str(&line).unwrap_or(Value::Null)),
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
            let agent = path.file_stem().unwrap_or_default().to_string_lossy();
            eprintln!(
                "hotspare: the agent with pid {agent} has not answered for {} s: is it stopped \
                 (`ps -o stat {agent}` says T)? Then `kill -CONT {agent}`",
                PATIENCE.as_secs()
            );
            None
        }
        _ => None,
    }
}

/// `hotspare status`.
pub fn status(json: bool) -> anyhow::Result<u8> {
    let answers = ask_all("status")?;
    if answers.is_empty() && !json {
        println!("no agent runs on this host");
    }
    if json {
        answers.iter().for_each(|(_, answer)| println!("{answer}"));
    } else if !answers.is_empty() {
        print!("{}", table(&answers.into_iter().map(|(_, answer)| answer).collect::<Vec<_>>()));
    }
    Ok(0)
}

/// One line for each agent, under a head.
fn table(agents: &[Value]) -> String {
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    };
    let pause = |answer: &Value| match answer["pause_p50_us"].as_f64() {
        Some(p50) if p50 > 0.0 => {
            format!("{p50:.0}/{:.0} µs", answer["pause_p99_us"].as_f64().unwrap_or(0.0))
        }
        _ => "-".to_owned(),
    };
    let spares = |answer: &Value| match answer["role"] == "primary" {
        true => format!("{} of {} ready", answer["ready"], answer["spares"]),
        false => "-".to_owned(),
    };
    let lease = |answer: &Value| match (answer["lease_ms"].as_u64(), answer["role"] == "primary") {
        (Some(0), true) => "over".to_owned(),
        (Some(ms), true) => format!("{:.1} s", ms as f64 / 1000.0),
        _ => "-".to_owned(),
    };
    let head = ["GUEST", "ROLE", "PID", "TERM", "EPOCH", "SPARES", "LEASE", "PAUSE p50/p99"];
    let mut rows = vec![head.map(str::to_owned)];
    rows.extend(agents.iter().map(|answer| {
        let [guest, role, pid, term, epoch] =
            ["guest", "role", "pid", "term", "epoch"].map(|name| text(&answer[name]));
        [guest, role, pid, term, epoch, spares(answer), lease(answer), pause(answer)]
    }));
    columns(&rows)
}

/// Rows with their cells below each other.
pub fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let width = |column: usize| {
        rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default()
    };
    let widths: Vec<usize> = (0..N).map(width).collect();
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// Fails if a guest of this name runs on this host.
pub fn require_free_name(guest: &str) -> anyhow::Result<()> {
    let mut taken = ask_all("status")?.into_iter().map(|(_, answer)| answer);
    let same = |answer: &Value| answer["guest"] == guest && answer["role"] == "primary";
    if let Some(answer) = taken.find(same) {
        bail!(
            "a guest named {guest:?} runs on this host already (pid {}): give this one another \
             name with --guest",
            answer["pid"]
        );
    }
    Ok(())
}

/// `hotspare switchover`: asks the primary on this host.
pub fn switchover(guest: Option<&str>) -> anyhow::Result<u8> {
    let mut primaries = ask_all("status")?;
    primaries.retain(|(_, answer)| {
        answer["role"] == "primary" && guest.is_none_or(|guest| answer["guest"] == guest)
    });
    let path = match &primaries[..] {
        [(path, _)] => path,
        [] => bail!("no such guest runs on this host; ask on the primary (`hotspare status`)"),
        many => {
            let names: Vec<_> =
                many.iter().map(|(_, answer)| answer["guest"].to_string()).collect();
            bail!(
                "{} guests run on this host: name one with --guest ({})",
                many.len(),
                names.join(", ")
            );
        }
    };
    let mut stream = UnixStream::connect(path).context("talk to the primary")?;
    writeln!(stream, "switchover")?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    let answer: Value = serde_json::from_str(&line).unwrap_or(Value::Null);
    if answer["moved"] == true {
        let (stall, epoch) = (&answer["stall_ms"], &answer["epoch"]);
        let stall = stall.as_f64().unwrap_or_default();
        println!("moved at epoch {epoch}: the guest stood still for {stall:.1} ms");
        return Ok(0);
    }
    let why = answer["why"].as_str().unwrap_or(
        "the primary ended without an answer; look at `hotspare status` on the host of the spare",
    );
    eprintln!("hotspare: the guest was not moved: {why}");
    Ok(NOT_MOVED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_guests_are_told_in_columns() {
        let agents = [
            json!({"guest": "redis", "role": "primary", "pid": 7, "term": 1, "epoch": 1234,
                   "spares": 2, "ready": 1, "lease_ms": 812, "pause_p50_us": 812.4, "pause_p99_us": 2000.0}),
            json!({"guest": "-", "role": "spare", "pid": 31234, "term": 0, "epoch": 0}),
        ];
        let expected = "\
GUEST  ROLE     PID    TERM  EPOCH  SPARES        LEASE  PAUSE p50/p99
redis  primary  7      1     1234   1 of 2 ready  0.8 s  812/2000 µs
-      spare    31234  0     0      -             -      -
";
        assert_eq!(table(&agents), expected);
    }
}
