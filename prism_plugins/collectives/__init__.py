"""The virtual process group: ``torch.distributed`` of one rank whose peers do not run.

Every backend name makes a :class:`~prism_plugins.collectives.group.VirtualProcessGroup`. It records each call
(:class:`~prism_plugins.program.model.CommSignature`) and lets the peers answer:

* :mod:`~prism_plugins.collectives.peers`: virtual peers hold what we hold (mirror semantics,
  :mod:`~prism_plugins.collectives.mirror`); control payloads that one rank decides come from the
  :mod:`~prism_plugins.collectives.journal` of the slice that ran as that rank.
* :mod:`~prism_plugins.collectives.real`: where all members of a group are processes that run now, the call is
  executed over gloo.

What is recorded, and where it differs from NCCL:

* One event a tensor; grouped calls (coalescing, ``batch_isend_irecv``) share a work id. all_to_all is one event
  with its splits, not the sends and receives NCCL makes of it.
* Point-to-point calls are asynchronous; ``dist.send`` and ``dist.recv`` are followed by the wait that torch makes.
* List forms (``all_gather`` into a list) do not allocate the flat buffer that ProcessGroupNCCL uses for them.
* Object collectives are recorded as the size and byte collectives torch makes of them, without device tensors.
* An asynchronous call keeps the tensors it writes until its handle dies, those it reads until the first wait.
"""
