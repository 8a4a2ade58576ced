//! The spare in the path of the guest's packets, on both hosts: see `hotspare_net::relay`.
//!
//! ```text
//! primary: a spare is ready ─▶ asks it ────────────▶ lends the address, packets go through it
//! spare:                       └▶ announces, relays ─┘
//! primary: the spare is gone, and will not take over ─▶ takes the address back
//! spare: takes over with what it has logged, or lets the address go
//! ```

use std::sync::{Arc, PoisonError};

use anyhow::Context;
use hotspare_cluster::Member;
use hotspare_image::{Epoch, NodeId};
use hotspare_net::relay::{Numbered, Relay};

use crate::agent::{Agent, Joined, StreamId};
use crate::primary::Primary;
use crate::settings::PacketPath;
use crate::spare::Spare;

/// Of a primary: the spare that packets pass through, or are going to.
#[derive(Clone, Copy, Debug)]
pub struct Through {
    node: NodeId,
    /// It has said that clients reach it.
    is_open: bool,
}

impl Primary {
    /// Asks the spare that would take over first to stand in the path, if none does.
    pub fn seek_path(&mut self) {
        let wanted = self.settings.path == PacketPath::Spare && self.gate().is_some();
        if !wanted || self.through.is_some() || self.is_freezing() || self.is_frozen() {
            return;
        }
        let fit = |member: &&Member| {
            member.ready && !member.stands_by && self.speaks_of_paths(member.node)
        };
        let Some(heir) = self.members.iter().filter(fit).min_by_key(|member| member.rank) else {
            return;
        };
        let node = heir.node;
        if let Some(spare) = self.maker.takers.spares.get(&node) {
            // A broken stream is reported by the reader of its answers.
            let _ = spare.open_path();
            self.through = Some(Through { node, is_open: false });
        }
    }

    /// A spare says that clients reach it.
    pub fn path_open(&mut self, node: NodeId, stream: StreamId) -> anyhow::Result<()> {
        let Some(through) = self.through.as_mut().filter(|through| through.node == node) else {
            return Ok(());
        };
        let Some(spare) = self.maker.takers.spares.get(&node) else { return Ok(()) };
        let Some(gate) = self.maker.gate() else { return Ok(()) };
        if self.reach.get(&node).is_none_or(|reach| reach.stream != stream) {
            return Ok(());
        }
        through.is_open = true;
        let packets = spare.packets();
        gate.lead_through(Some(Box::new(move |epoch: Epoch, packet: &[u8]| {
            packets.output(epoch, packet);
        })));
        self.maker.through = Some(node);
        self.agent.set_path(Some(node));
        if let Some(network) = self.maker.network.as_mut() {
            network.lend().context("leave the service address to the spare in the path")?;
        }
        let note = format!("clients reach the guest through the spare {node} from now on");
        self.agent.reporter.note(&note);
        Ok(())
    }

    /// A spare is gone; if it was in the path, clients have to reach this host again.
    pub fn path_lost(&mut self, node: NodeId) {
        let Some(through) = self.through.take_if(|through| through.node == node) else { return };
        self.maker.through = None;
        self.agent.set_path(None);
        if !through.is_open {
            return;
        }
        if let Some(gate) = self.maker.gate() {
            gate.lead_through(None);
        }
        self.lent_to = Some(node);
        self.take_address_back();
    }

    /// Lets clients reach this host again, unless the arbiter may give the spare that they reach
    /// now the term.
    pub fn take_address_back(&mut self) {
        let Some(node) = self.lent_to else { return };
        if self.agent.awaited_heirs().contains(&node) {
            return;
        }
        self.lent_to = None;
        let Some(network) = self.maker.network.as_mut().filter(|network| network.is_announced())
        else {
            return;
        };
        if let Err(error) = network.announce() {
            let note = format!("the service address could not be taken back: {error}");
            self.agent.reporter.note(&note);
        }
    }
}

/// A relay that ends when this is dropped: its thread keeps the host's interface open.
#[derive(Debug)]
pub struct Standing(pub Arc<Relay>);

impl Drop for Standing {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Spare {
    /// The primary wants packets to pass through here.
    pub fn open_path(&mut self, stream: StreamId) {
        let joined = self.following.as_ref().filter(|joined| joined.stream == stream);
        let (Some(joined), Some(held)) = (joined, self.ghost.as_mut()) else { return };
        let (Some(network), Some(relay)) = (held.network.as_mut(), held.relay.as_ref()) else {
            return;
        };
        let relaying = network.announce().map_err(anyhow::Error::from);
        let relaying = relaying.and_then(|_| relay_for(joined, &relay.0));
        if let Err(error) = relaying {
            let note = format!("packets cannot pass through this host: {error:#}");
            self.agent.reporter.note(&note);
        }
    }

    /// This spare will not take over from the primary whose packets pass here, if they do; whether
    /// they did. Another stream may ask for the path anew.
    pub fn leave_path(&mut self) -> bool {
        let Some(held) = self.ghost.as_mut() else { return false };
        let Some(network) = held.network.as_mut().filter(|network| network.is_announced()) else {
            return false;
        };
        // What it has logged is of no use to another primary.
        held.relay = None;
        let left = network.withdraw().and_then(|()| network.relay().transpose());
        match left {
            Ok(relay) => held.relay = relay.map(|relay| Standing(Arc::new(relay))),
            Err(error) => {
                let note = format!("the service address could not be let go: {error}");
                self.agent.reporter.note(&note);
            }
        }
        true
    }
}

/// Passes on what clients say, on a thread of its own, and tells the primary.
fn relay_for(joined: &Joined, relay: &Arc<Relay>) -> anyhow::Result<()> {
    let (relay, replier) = (Arc::clone(relay), Arc::clone(&joined.replier));
    let mut to = joined.replier.lock().unwrap_or_else(PoisonError::into_inner);
    // Its first packet comes after this. A primary that is gone does not hear it.
    let _ = to.path_open();
    drop(to);
    let pass_on = move |packets: &[Numbered]| {
        let mut to = replier.lock().unwrap_or_else(PoisonError::into_inner);
        // What does not arrive is in the log.
        let _ = to.inputs(packets.iter().map(|(number, packet)| (*number, &**packet)));
    };
    std::thread::Builder::new().name("relay".into()).spawn(move || relay.run(pass_on))?;
    Ok(())
}

impl Agent {
    /// Of a primary: packets pass through this spare, which waits for its own checkpoints.
    pub fn set_path(&self, through: Option<NodeId>) {
        self.face().path = through;
        self.let_go();
    }
}
