"""What meshes models of others can have their sequences split over."""

from bmburst.errors import UserError
from bmburst.mesh import Mesh


def require_mesh(mesh: object, made: str, whose: str) -> None:
    """Check that a mesh is one, and splits no matrices.

    Args:
        mesh: As given.
        made: How such a mesh is made, for the message.
        whose: Whose matrices are whole, for the message.

    Raises:
        UserError: It is none, or does.
    """
    if not isinstance(mesh, Mesh):
        raise UserError(f"mesh must be a bmburst.Mesh, got {type(mesh).__name__}\nfix: {made}")
    if mesh.shape.tensor > 1:
        raise UserError(
            f"a mesh with tensor {mesh.shape.tensor} splits matrices, which {whose} models have whole\nfix: tensor=1"
        )
