//! `hotspare history --store` and `hotspare inspect`: what is in a store, and in a checkpoint.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use hotspare_image::memory::{AddressSpace, Backing, PAGE_BYTES, PageOwner};
use hotspare_image::objects::Object;
use hotspare_image::sockets::{SocketAddress, TcpState};
use hotspare_image::source::{BlockContent, PageSource, Span};
use hotspare_image::tree::{Process, ProcessState};
use hotspare_image::{Checkpoint, SharedBytes};
use hotspare_store::{Address, Base, Key, Loaded, Name, Store};
use serde_json::{Value, json};

use super::restore::{At, find};
use crate::control::columns;
use crate::history::utc;
use crate::report::size;

/// Largest regions that are shown.
const REGIONS: usize = 10;
/// Pages that are compared at once.
const COMPARE_PAGES: u64 = 2048;

/// `hotspare inspect`.
#[derive(Debug, Args)]
pub struct InspectArguments {
    /// Which checkpoint: an epoch, a time (2026-11-22T18:30:00, UTC: the newest of then), or so
    /// long ago (10m).
    #[arg(long, default_value = "newest", value_name = "EPOCH|TIME")]
    at: At,
    /// Also what has changed since this one.
    #[arg(long, value_name = "EPOCH|TIME")]
    since: Option<At>,
    /// Read and check every byte of it.
    #[arg(long)]
    verify: bool,
    /// One JSON object.
    #[arg(long)]
    json: bool,
    /// File with the key it was stored with.
    #[arg(long, value_name = "FILE", env = "HOTSPARE_STORE_KEY")]
    store_key: Option<PathBuf>,
    /// The store.
    #[arg(value_name = "STORE")]
    store: Address,
    /// The guest.
    guest: String,
}

fn when(ms: u64) -> String {
    utc(Duration::from_millis(ms)).replacen('T', " ", 1).trim_end_matches('Z').to_owned()
}

/// Shows which checkpoints a store has.
pub fn history(address: &Address, guest: Option<&str>, json: bool) -> anyhow::Result<u8> {
    let store = Store::open(address, None)?;
    let guests = match guest {
        Some(guest) => vec![guest.to_owned()],
        None => store.guests()?,
    };
    let head = ["GUEST", "REIGN", "HOST", "WHEN (UTC)", "EPOCH", "BYTES", "STANDS ON"];
    let mut rows = vec![head.map(str::to_owned)];
    let mut all = 0;
    for guest in &guests {
        let names = store.catalogue(guest)?.names();
        let mut hosts = BTreeMap::new();
        for name in &names {
            all += name.bytes;
            let host = hosts.entry(name.reign).or_insert_with(|| {
                store.reign(guest, name.reign).map_or_else(|_| "?".to_owned(), |reign| reign.host)
            });
            if json {
                println!("{}", in_json(guest, host, name));
            } else {
                rows.push(row(guest, host, name));
            }
        }
    }
    if !json && rows.len() > 1 {
        print!("{}", columns(&rows));
        println!("{} checkpoints, {} in {address}", rows.len() - 1, size(all));
    } else if !json {
        eprintln!("hotspare: no checkpoints in {address}");
    }
    Ok(if rows.len() == 1 && !json { 1 } else { 0 })
}

fn row(guest: &str, host: &str, name: &Name) -> [String; 7] {
    let base = match name.base {
        Base::Whole => "nothing: whole".to_owned(),
        Base::Epoch(epoch) => epoch.to_string(),
    };
    let (reign, epoch) = (name.reign.to_string(), name.epoch.to_string());
    [guest.to_owned(), reign, host.to_owned(), when(name.time_ms), epoch, size(name.bytes), base]
}

fn in_json(guest: &str, host: &str, name: &Name) -> Value {
    let base = match name.base {
        Base::Whole => None,
        Base::Epoch(epoch) => Some(epoch),
    };
    json!({
        "guest": guest, "reign": name.reign, "host": host, "wall_ms": name.time_ms,
        "epoch": name.epoch, "bytes": name.bytes, "stands_on": base,
    })
}

/// Shows what is in a checkpoint.
pub fn inspect(arguments: &InspectArguments) -> anyhow::Result<u8> {
    let key = arguments.store_key.as_deref().map(Key::load).transpose()?;
    let store = Store::open(&arguments.store, key)?;
    let loaded = find(&store, &arguments.guest, arguments.at)?;
    let checkpoint = loaded.checkpoint()?;
    let mut shown = inside(&loaded, &checkpoint);
    if arguments.verify {
        shown["verified_objects"] = loaded.verify()?.into();
    }
    if let Some(since) = arguments.since {
        let before = find(&store, &arguments.guest, since)?;
        shown["since"] = difference(&before, &loaded)?;
    }
    if arguments.json {
        println!("{shown}");
    } else {
        print!("{}", in_words(&shown));
    }
    Ok(0)
}

fn inside(loaded: &Loaded, checkpoint: &Checkpoint) -> Value {
    let about = loaded.about();
    let chain: Vec<u64> = loaded.chain().map(|name| name.epoch).collect();
    let bytes: u64 = loaded.chain().map(|name| name.bytes).sum();
    let processes: Vec<Value> =
        checkpoint.processes.iter().map(|process| told(process, checkpoint)).collect();
    json!({
        "guest": about.guest,
        "epoch": about.position.epoch.0,
        "term": about.term.0,
        "wall_ms": about.time_ms,
        "chain": chain,
        "stored_bytes": bytes,
        "memory_bytes": loaded.pages().with_bytes() * PAGE_BYTES,
        "file_change_bytes": loaded.changes_bytes(),
        "kernel": about.host.kernel,
        "settings": about.settings,
        "files_alike": about.files.len(),
        "processes": processes,
        "shared_objects": checkpoint.shared.len(),
        "descriptors": descriptors(checkpoint),
        "sockets": sockets(checkpoint),
        "regions": regions(loaded, checkpoint),
    })
}

fn told(process: &Process, checkpoint: &Checkpoint) -> Value {
    let ProcessState::Alive(live) = &process.state else {
        return json!({ "pid": process.pid.0, "parent": process.parent.0, "zombie": true });
    };
    let space = checkpoint.spaces.iter().find(|space| space.id == live.mm);
    json!({
        "pid": process.pid.0,
        "parent": process.parent.0,
        "exe": space.map(|space| space.exe.0.clone()),
        "threads": live.threads.len(),
        "descriptors": live.descriptors.len(),
        "mappings": space.map_or(0, |space| space.mappings.len()),
    })
}

fn kind(object: &Object) -> &'static str {
    match object {
        Object::Regular(_) => "file",
        Object::Directory(_) => "directory",
        Object::Pipe(_) => "pipe",
        Object::EventFd(_) => "eventfd",
        Object::Epoll(_) => "epoll",
        Object::TimerFd(_) => "timerfd",
        Object::SignalFd(_) => "signalfd",
        Object::Inotify(_) => "inotify",
        Object::PidFd(_) => "pidfd",
        Object::Memfd(_) => "memfd",
        Object::Device(_) => "device",
        Object::Outside(_) => "outside",
        Object::Unix(_) => "unix",
        Object::Udp(_) => "udp",
        Object::Tcp(_) => "tcp",
        Object::Netlink(_) => "netlink",
        Object::MessageQueue(_) => "message queue",
        Object::Proc(_) => "/proc",
    }
}

fn descriptors(checkpoint: &Checkpoint) -> Value {
    let mut kinds: BTreeMap<&str, u64> = BTreeMap::new();
    for file in &checkpoint.files {
        *kinds.entry(kind(&file.object)).or_default() += 1;
    }
    json!(kinds)
}

fn sockets(checkpoint: &Checkpoint) -> Vec<String> {
    let words = |address: &Option<SocketAddress>| {
        let address = address.as_ref().and_then(SocketAddress::internet);
        address.map_or("-".to_owned(), |address| address.to_string())
    };
    let told = |object: &Object| match object {
        Object::Udp(socket) => Some(format!("udp {}", words(&socket.local))),
        Object::Tcp(socket) => Some(match &socket.state {
            TcpState::Connected(connection) => format!(
                "tcp {} connected to {}",
                words(&socket.local),
                words(&Some(connection.remote.clone()))
            ),
            TcpState::Listening { .. } => format!("tcp {} listens", words(&socket.local)),
            _ => format!("tcp {}", words(&socket.local)),
        }),
        _ => None,
    };
    checkpoint.files.iter().filter_map(|file| told(&file.object)).collect()
}

fn regions(loaded: &Loaded, checkpoint: &Checkpoint) -> Vec<Value> {
    let mut found = Vec::new();
    for space in &checkpoint.spaces {
        let Some(owned) = loaded.pages().0.get(&PageOwner::Mm(space.id)) else { continue };
        for mapping in &space.mappings {
            let (first, pages) =
                (mapping.range.start.0 / PAGE_BYTES, mapping.range.bytes() / PAGE_BYTES);
            let mut covered = Vec::new();
            owned
                .pages
                .cover(first, pages, |first, pages, held| covered.push((first, pages, held)));
            let has = covered.iter().filter(|(_, _, held)| held.is_some());
            let stored: u64 = has.map(|(_, pages, _)| pages * PAGE_BYTES).sum();
            found.push((stored, mapping.range.start.0, name_of(space, &mapping.backing), space));
        }
    }
    found.sort_by_key(|region| std::cmp::Reverse(region.0));
    let some = found.into_iter().take(REGIONS).filter(|region| region.0 > 0);
    some.map(|(bytes, at, name, space)| {
        json!({ "bytes": bytes, "at": format!("{at:#x}"), "what": name, "exe": space.exe.0 })
    })
    .collect()
}

fn name_of(space: &AddressSpace, backing: &Backing) -> String {
    match backing {
        Backing::Anonymous => "anonymous".to_owned(),
        Backing::PrivateFile { file, .. } if file.path == space.exe => "the program".to_owned(),
        Backing::PrivateFile { file, .. } | Backing::SharedFile { file, .. } => file.path.0.clone(),
        Backing::SharedMemory { object, .. } => format!("shared memory {}", object.0),
        Backing::Special { name } => name.clone(),
    }
}

/// What has changed from one checkpoint to another.
fn difference(before: &Loaded, after: &Loaded) -> anyhow::Result<Value> {
    let (old, new) = (before.checkpoint()?, after.checkpoint()?);
    let pids = |checkpoint: &Checkpoint| -> Vec<i32> {
        checkpoint.processes.iter().map(|process| process.pid.0).collect()
    };
    let (were, are) = (pids(&old), pids(&new));
    let born: Vec<i32> = are.iter().filter(|pid| !were.contains(pid)).copied().collect();
    let ended: Vec<i32> = were.iter().filter(|pid| !are.contains(pid)).copied().collect();
    let (mut changed, mut same, mut added) = (0u64, 0u64, 0u64);
    let mut waiting: Vec<Span> = Vec::new();
    let mut room = COMPARE_PAGES;
    for span in after.all().into_iter().map(Some).chain([None]) {
        if let Some(span) = span {
            room = room.saturating_sub(span.pages);
            waiting.push(span);
        }
        if room > 0 && span.is_some() {
            continue;
        }
        let (then, now) = (pages_of(before, &waiting)?, pages_of(after, &waiting)?);
        for (place, page) in &now {
            match then.get(place) {
                Some(Some(old)) if Some(old) == page.as_ref() => same += 1,
                Some(Some(_)) => changed += 1,
                _ => added += 1,
            }
        }
        waiting.clear();
        room = COMPARE_PAGES;
    }
    let seconds = after.about().time_ms.saturating_sub(before.about().time_ms) as f64 / 1000.0;
    Ok(json!({
        "epoch": before.about().position.epoch.0,
        "seconds": seconds,
        "pages_changed": changed,
        "pages_added": added,
        "pages_same": same,
        "processes_born": born,
        "processes_ended": ended,
        "descriptors": new.files.len() as i64 - old.files.len() as i64,
    }))
}

type PagesByPlace = BTreeMap<(PageOwner, u64), Option<SharedBytes>>;

/// Each page, none where it has nothing of its own.
fn pages_of(loaded: &Loaded, spans: &[Span]) -> anyhow::Result<PagesByPlace> {
    let mut found = BTreeMap::new();
    let zero = SharedBytes::from(vec![0; PAGE_BYTES as usize]);
    for block in loaded.read(spans)? {
        for page in 0..block.span.pages {
            let from = (page * PAGE_BYTES) as usize;
            let bytes = match &block.content {
                BlockContent::Bytes(bytes) => Some(bytes.part(from..from + PAGE_BYTES as usize)),
                BlockContent::Zero => Some(zero.clone()),
                BlockContent::Absent => None,
            };
            found.insert((block.span.owner, block.span.start + page * PAGE_BYTES), bytes);
        }
    }
    Ok(found)
}

fn in_words(shown: &Value) -> String {
    let number = |name: &str| shown[name].as_u64().unwrap_or(0);
    let mut text = format!(
        "{} at epoch {}, {} (UTC): {} of memory, {} of file changes, {} stored in {} \
         checkpoint(s)\n",
        shown["guest"].as_str().unwrap_or("-"),
        number("epoch"),
        when(number("wall_ms")),
        size(number("memory_bytes")),
        size(number("file_change_bytes")),
        size(number("stored_bytes")),
        shown["chain"].as_array().map_or(0, Vec::len),
    );
    let mut line = |what: &str| {
        text.push_str(what);
        text.push('\n');
    };
    line(&format!("kernel {}", shown["kernel"].as_str().unwrap_or("-")));
    for process in shown["processes"].as_array().into_iter().flatten() {
        match process["zombie"].as_bool() {
            Some(true) => line(&format!("process {}: zombie", process["pid"])),
            _ => line(&format!(
                "process {} of {}: {}, {} thread(s), {} mappings, {} descriptors",
                process["pid"],
                process["parent"],
                process["exe"].as_str().unwrap_or("-"),
                process["threads"],
                process["mappings"],
                process["descriptors"]
            )),
        }
    }
    let kinds = shown["descriptors"].as_object().into_iter().flatten();
    let kinds: Vec<String> = kinds.map(|(kind, count)| format!("{count} {kind}")).collect();
    line(&format!("open: {}", kinds.join(", ")));
    for socket in shown["sockets"].as_array().into_iter().flatten() {
        line(&format!("  {}", socket.as_str().unwrap_or("-")));
    }
    for region in shown["regions"].as_array().into_iter().flatten() {
        let bytes = size(region["bytes"].as_u64().unwrap_or(0));
        let word = |name: &str| region[name].as_str().unwrap_or("-").to_owned();
        line(&format!("  {bytes} at {}: {} of {}", word("at"), word("what"), word("exe")));
    }
    if let Some(objects) = shown["verified_objects"].as_u64() {
        line(&format!("every byte of {objects} objects is as it was written"));
    }
    if let Some(since) = shown.get("since") {
        line(&format!(
            "since epoch {}, {} s before: {} pages changed, {} came, {} are the same; processes \
             born {}, ended {}; descriptors {:+}",
            since["epoch"],
            since["seconds"],
            since["pages_changed"],
            since["pages_added"],
            since["pages_same"],
            since["processes_born"],
            since["processes_ended"],
            since["descriptors"].as_i64().unwrap_or(0)
        ));
    }
    text
}
