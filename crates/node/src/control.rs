//! The control socket: one line in, one line of JSON out.
//!
//! Each agent listens on `/run/hotspare/PID.sock`, which only root can open. It knows `status` and
//! `switchover`, which is answered when its outcome is known.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use anyhow::{Context, bail};
use serde_json::{Value, json};

use crate::agent::{Agent, Message};
use crate::switchover::Asker;

const DIRECTORY: &str = "/run/hotspare";
/// Exit status of a switchover that came to nothing.
const NOT_MOVED: u8 = 1;

/// Answers on the control socket for as long as the program lives.
pub fn serve(agent: &Agent) -> anyhow::Result<()> {
    std::fs::create_dir_all(DIRECTORY).with_context(|| format!("make {DIRECTORY}"))?;
    let path = PathBuf::from(format!("{DIRECTORY}/{}.sock", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener =
        UnixListener::bind(&path).with_context(|| format!("listen on {}", path.display()))?;
    let agent = agent.clone();
    std::thread::Builder::new().name("control".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            // A client that goes away in the middle is its own affair.
            let _ = answer(&agent, stream);
        }
    })?;
    Ok(())
}

fn answer(agent: &Agent, stream: UnixStream) -> std::io::Result<()> {
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
            Ok(mut stream) => {
                writeln!(stream, "{request}")?;
                let mut line = String::new();
                BufReader::new(stream).read_line(&mut line)?;
                answers.push((path, serde_json::from_str(&line).unwrap_or(Value::Null)));
            }
            // Left behind by an agent that was killed.
            Err(_) => drop(std::fs::remove_file(&path)),
        }
    }
    Ok(answers)
}

/// `hotspare status`.
pub fn status(json: bool) -> anyhow::Result<u8> {
    let answers = ask_all("status")?;
    if answers.is_empty() && !json {
        println!("no agent runs on this host");
    }
    for (_, answer) in answers {
        if json {
            println!("{answer}");
            continue;
        }
        let text = |name: &str| match &answer[name] {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        println!(
            "{} (pid {})  {}  term {}  epoch {}  spares {}",
            text("guest"),
            text("pid"),
            text("role"),
            text("term"),
            text("epoch"),
            text("spares")
        );
    }
    Ok(0)
}

/// `hotspare switchover`: asks the primary on this host.
pub fn switchover() -> anyhow::Result<u8> {
    let primaries: Vec<_> =
        ask_all("status")?.into_iter().filter(|(_, answer)| answer["role"] == "primary").collect();
    let [(path, _)] = &primaries[..] else {
        bail!("{} primaries run on this host; exactly one is needed", primaries.len());
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
