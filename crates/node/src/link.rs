//! The primary's end of a stream: greets a spare, then carries its acknowledgements home.

use std::io::{BufReader, Read};
use std::net::SocketAddr;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, bail};
use hotspare_cluster::{Closed, Event};
use hotspare_image::NodeId;
use hotspare_kernel::kill_point::{KillPoint, pass};
use hotspare_net::gate::Gate;
use hotspare_replica::message::{RefuseCode, VERSION_OF_KEPT};
use hotspare_replica::{
    Channel, Compression, GoodbyeCode, Greeting, Reply, ReplyReader, Welcome, closed, sender,
};

use crate::agent::{Agent, Decision, Message, SpareIn, StreamId};
use crate::alike::{Attempts, FilesDiffer};
use crate::facts;

/// Bytes that may wait for a spare; see `docs/formats/stream.md`.
pub const QUEUE_BYTES: usize = 16 << 20;
/// How long the brain may take to answer a spare that asks to join.
const DECISION: Duration = Duration::from_secs(10);
/// Read at once: frames are small, but many.
pub const READ_BYTES: usize = 64 << 10;
/// Of a spare that tells what it has kept, before pages go to it.
const HEAD_START: Duration = Duration::from_millis(300);
const REDIAL: Duration = Duration::from_millis(300);

/// Dials a spare again and again for as long as the program lives.
pub fn keep_dialling(agent: &Agent, address: &str) -> anyhow::Result<()> {
    let (agent, address) = (agent.clone(), address.to_owned());
    std::thread::Builder::new().name("dialler".into()).spawn(move || {
        let mut attempts = Attempts::new();
        loop {
            let met = Channel::connect(&address, &agent.security)
                .map_err(anyhow::Error::from)
                .and_then(|channel| serve(&agent, channel));
            let (news, wait) = attempts.ended(met, REDIAL);
            if let Some(text) = news {
                agent.reporter.note(&format!("spare {address}: {text}; trying again"));
            }
            std::thread::sleep(wait);
        }
    })?;
    Ok(())
}

/// Plays the primary on a connection until it ends.
pub fn serve(agent: &Agent, channel: Channel) -> anyhow::Result<()> {
    let peer_address = channel.peer();
    let own = agent.hello();
    let ours = agent.facts.clone();
    let mut greeting =
        Greeting::exchange(channel, &own, move |peer| facts::judge(&ours, &peer.facts))?;
    greeting.await_spare()?;
    let node = greeting.peer.node;
    let heart = SocketAddr::new(peer_address.ip(), greeting.peer.heart_port);
    let listens = greeting.peer.listen_port.map(|port| SocketAddr::new(peer_address.ip(), port));
    let (answer, decision) = mpsc::channel::<Decision>();
    let stream = agent.open_stream(node);
    agent.face().waiting.push((node, answer));
    agent.brain.tell(Event::SpareJoined(node));
    let Some((rank, term)) = decision.recv_timeout(DECISION).ok().flatten() else {
        bail!(greeting.refuse(RefuseCode::Busy, "not now: try again in a moment".into()));
    };
    let welcome = {
        let face = agent.face();
        Welcome {
            version: 0,
            term,
            rank,
            heart_key: face.key.map(|key| key.to_vec()).unwrap_or_default(),
            settings: face.settings.as_ref().map(|all| all.to_pairs()).unwrap_or_default(),
        }
    };
    let version = greeting.version;
    let (channel, _) = greeting.welcome(&welcome)?;
    agent.add_peer(node, heart);
    if agent.face().gate.is_some() {
        channel.keep_short().context("let the guest's packets go first")?;
    }
    let (read, write, hangup) = channel.split().context("split the stream")?;
    let read = BufReader::with_capacity(READ_BYTES, read);
    let (sender, writer, mut replies) = sender(write, read, QUEUE_BYTES, Compression::Adaptive);
    std::thread::Builder::new().name("writer".into()).spawn(move || {
        // The reader of answers reports a broken stream.
        let _ = writer.run();
        hangup.hang_up();
    })?;
    agent.face().ways.insert(node, (stream, sender.packets()));
    let spare = SpareIn { node, sender, heart, listens, stream, version };
    let entering = enter(agent, spare)?;
    let (how, differ) = hear(agent, node, stream, &mut replies);
    // In this order: it is in, it is out.
    drop(entering.join());
    agent.face().ways.retain(|_, (of, _)| *of != stream);
    agent.owner.send(Message::SpareOut(node, stream));
    agent.tell_of(node, stream, Event::StreamClosed { peer: node, how });
    differ.map_or(Ok(()), |differ| Err(differ.into()))
}

/// Lets a spare in once it has told what it has kept. One that has much to tell goes on with that
/// beside its first checkpoint.
fn enter(agent: &Agent, spare: SpareIn) -> std::io::Result<JoinHandle<()>> {
    let agent = agent.clone();
    std::thread::Builder::new().name("enter".into()).spawn(move || {
        if spare.version >= VERSION_OF_KEPT {
            spare.sender.await_kept(HEAD_START);
        }
        agent.owner.send(Message::SpareIn(Box::new(spare)));
    })
}

/// Passes on what a spare says until the stream ends; how that was, and whether files differ.
fn hear(
    agent: &Agent,
    node: NodeId,
    stream: StreamId,
    replies: &mut ReplyReader<impl Read>,
) -> (Closed, Option<FilesDiffer>) {
    let (mut differ, mut gate) = (None, None::<Arc<Gate>>);
    let how = loop {
        match replies.next() {
            Ok(Reply::Input(number, packet)) => {
                if let Some(gate) = &gate {
                    gate.input(number, packet);
                }
            }
            Ok(Reply::PathOpen) => {
                gate = agent.face().gate.clone();
                gate.iter().for_each(|gate| gate.begin_inputs());
                agent.owner.send(Message::PathOpen(node, stream));
            }
            Ok(Reply::Committed(committed)) => {
                // First of all: clients wait for it.
                pass(KillPoint::Acknowledged);
                agent.committed(node, committed);
                pass(KillPoint::Released);
                let position = committed.position();
                agent.tell_of(node, stream, Event::SpareAcknowledged { node, position });
                agent.owner.send(Message::Acknowledged(node, position));
            }
            Ok(Reply::SwitchoverRefused(why)) => {
                agent.owner.send(Message::SwitchoverRefused(node, why));
            }
            Ok(Reply::Goodbye(goodbye)) => {
                if goodbye.code == GoodbyeCode::Files {
                    differ = Some(FilesDiffer(goodbye.text));
                } else {
                    agent.reporter.note(&format!("the spare leaves: {}", goodbye.text));
                }
                break Closed::Goodbye;
            }
            Err(error) => {
                agent.reporter.note(&format!("the stream to spare {node} ended: {error}"));
                break closed(&error);
            }
        }
    };
    (how, differ)
}
