//! Output of a primary whose guest has a gate (`--guarantee output-commit`).
//!
//! ```text
//! output ──▶ held ──▶ wanted ──▶ checkpoint ──▶ acknowledged ──▶ let go
//!                       │ (this thread)              │ (thread of that spare)
//!                       └── as soon as the checkpoint before is acknowledged
//! ```

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotspare_image::{NodeId, Position};
use hotspare_net::gate::Gate;
use hotspare_net::takeover::ServiceNetwork;
use hotspare_replica::{Committed, Sender};

use crate::agent::{Agent, Message};
use crate::epoch::EpochMaker;
use crate::primary::Primary;

/// How long no checkpoint is tried after one was refused: what stands in the way may go away.
const AFTER_REFUSAL: Duration = Duration::from_secs(5);

/// Lets packets pass from now on, if they need somebody for that.
pub fn begin(agent: &Agent, network: &ServiceNetwork) -> anyhow::Result<()> {
    let Some(gate) = network.gate() else { return Ok(()) };
    if let Some(arbiter) = &agent.arbiter {
        gate.bind(Arc::clone(&arbiter.lease));
    }
    agent.face().gate = Some(Arc::clone(gate));
    let (gate, owner) = (Arc::clone(gate), agent.owner.clone());
    let pass = move || gate.run(|| owner.send(Message::OutputWaits));
    std::thread::Builder::new().name("gate".into()).spawn(pass)?;
    Ok(())
}

impl EpochMaker {
    /// Where output is held, if it is.
    pub fn gate(&self) -> Option<&Gate> {
        if !self.holds_output {
            return None;
        }
        self.network.as_ref()?.gate().map(Arc::as_ref)
    }
}

impl Agent {
    /// A spare has acknowledged a checkpoint. What all have now that output waits for leaves: any
    /// of them may be the one that takes over.
    pub fn committed(&self, node: NodeId, committed: Committed) {
        self.face().committed.insert(node, committed);
        self.let_go();
    }

    /// A spare will not take over: nothing waits for it any more.
    pub fn forget(&self, node: NodeId) {
        self.face().committed.remove(&node);
        self.let_go();
    }

    /// Output waits for these spares from now on; how much clients may have seen without them.
    pub fn await_spares(&self, nodes: &BTreeSet<NodeId>) -> Position {
        self.face().awaited.clone_from(nodes);
        self.let_go();
        let gate = self.face().gate.clone();
        gate.map_or(Position::default(), |gate| Position::checkpoint(gate.shown()))
    }

    /// Lets go what everybody has who could take over: the spares that are waited for, and all
    /// heirs that the arbiter knows. The one in the path waits for itself.
    pub fn let_go(&self) {
        let heirs = self.awaited_heirs();
        // To the end: a spare that is waited for, or a path that is lost, must not be overlooked.
        let face = self.face();
        let Some(gate) = &face.gate else { return };
        let (mut all, mut waited_for) = (None, None);
        for node in face.awaited.union(&heirs) {
            let Some(committed) = face.committed.get(node) else { return gate.withhold() };
            let least = |before: Option<Committed>| {
                Some(before.map_or(*committed, |before| before.min(*committed)))
            };
            all = least(all);
            if face.path != Some(*node) {
                waited_for = least(waited_for);
            }
        }
        if let Some(all) = all {
            gate.commit(all, waited_for, !heirs.is_empty());
        }
    }

    /// Output waits for nobody from now on, unless it has to wait for spares. Both are decided in
    /// one place: what [`Agent::await_spares`] says of what was shown stays true while it waits.
    fn open_gate(&self, gate: &Gate) {
        let face = self.face();
        if face.awaited.is_empty() {
            gate.open();
        }
    }

    /// Whether output waits for all of these.
    pub fn awaits(&self, nodes: &BTreeSet<NodeId>) -> bool {
        self.face().awaited.is_superset(nodes)
    }

    /// Spares without which nothing may leave: the arbiter would give them the term at once.
    pub fn awaited_heirs(&self) -> BTreeSet<NodeId> {
        let Some(arbiter) = &self.arbiter else { return BTreeSet::new() };
        let heirs = arbiter.lease.heirs();
        if heirs.are_awaited() { heirs.nodes.clone() } else { BTreeSet::new() }
    }
}

impl Primary {
    /// Where output is held, if it is.
    pub fn gate(&self) -> Option<&Gate> {
        self.maker.gate()
    }

    /// A spare is gone; the way to it.
    pub fn leave(&mut self, node: NodeId) -> Option<Sender> {
        self.path_lost(node);
        self.agent.forget(node);
        let spare = self.maker.leave(node);
        self.count_spares();
        spare
    }

    /// When the next checkpoint is due: at `next`, or earlier since output waits. One whose
    /// predecessor is under way would only wait behind it.
    pub fn due(&self, next: Instant) -> Instant {
        let next = next.max(self.earliest);
        let Some(gate) = self.gate().filter(|_| self.committed >= self.maker.epoch) else {
            return next;
        };
        gate.wanted().map_or(next, |wanted| wanted.max(self.earliest).min(next))
    }

    /// Output waits for nobody if nobody could take over.
    ///
    /// A spare whose stream has ended counts as gone here. An arbiter has struck it out by then, or
    /// has given it the term. Without one nothing better is known: a spare that lives and was only
    /// cut off takes over, and both hosts speak.
    pub fn open_gate_if_alone(&self) {
        let Some(gate) = self.gate() else { return };
        let replaceable = self.maker.can_be_replaced() || !self.agent.awaited_heirs().is_empty();
        if gate.is_closed() && !replaceable && !self.is_frozen() {
            self.agent.open_gate(gate);
        }
    }

    /// The guest cannot be protected at this time; returns how long to wait. Clients must not wait
    /// as long: the spares let their ghosts go, and what has been held leaves.
    pub fn refused(&mut self) -> Duration {
        if !self.gate().is_some_and(Gate::is_closed) {
            return self.settings.epoch();
        }
        self.let_spares_go("the guest cannot be protected at this time, see the primary");
        self.earliest = Instant::now() + AFTER_REFUSAL;
        AFTER_REFUSAL
    }
}
